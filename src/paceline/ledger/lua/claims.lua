-- The claims of steps.
local function claim_of(step)
  local text = call('HGET', CLAIMS, integer(step))
  return text and cjson.decode(text)
end

-- Steps that have a recorded claim, in order.
local function claimed_steps()
  local steps = {}
  for _, name in ipairs(call('HKEYS', CLAIMS)) do
    steps[#steps + 1] = tonumber(name)
  end
  table.sort(steps)
  return steps
end

local function train(step, claim)
  for _, item in ipairs(claim.groups) do
    local group = load(item[1])
    if group.state == 'claimed' then
      move(group, 'trained', 'step ' .. integer(step))
    end
  end
end
