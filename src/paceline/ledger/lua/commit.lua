-- ARGV: identity, step. Settles every step up to it: payloads and claims go, the ids of its groups stay.
need_trainer()
local last, done = tonumber(ARGV[2]), 0
local steps = claimed_steps()
for _, step in ipairs(steps) do
  for _, item in ipairs(step <= last and claim_of(step).groups or {}) do
    local state = load(item[1]).state
    if state ~= 'trained' then
      refuse('FAILED_PRECONDITION', 'step ' .. integer(step) .. ' of run ' .. RUN .. ' cannot be committed: group '
        .. item[1] .. ' is ' .. state .. '; call mark_trained first')
    end
  end
end
for _, step in ipairs(steps) do
  if step <= last then
    local ids = {}
    for at, item in ipairs(claim_of(step).groups) do
      ids[at] = item[1]
      move(load(item[1]), 'committed', 'step ' .. integer(step))
    end
    call('HSET', STEPS, integer(step), table.concat(ids, ' '))
    call('HDEL', CLAIMS, integer(step))
    call('HSET', META, 'committed_step', integer(step))
    done = done + 1
  end
end
return done
