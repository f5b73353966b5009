-- ARGV: identity, step, reissue_committed (0 or 1). Brings the ledger to a trainer that was loaded from a checkpoint.
-- Returns the later steps whose claims will be replayed.
need_trainer()
local step, committed = tonumber(ARGV[2]), meta('committed_step')
local steps = claimed_steps()

local function give_back(ids, why)
  for _, id in ipairs(ids) do
    move(load(id), 'waiting', why)
  end
end

if step < committed then
  if ARGV[3] ~= '1' then
    refuse('FAILED_PRECONDITION', 'run ' .. RUN .. ' has committed step ' .. integer(committed)
      .. ', but the trainer was loaded from step ' .. ARGV[2] .. '; load the newer checkpoint, or rewind with '
      .. 'reissue_committed to train the prompts of the steps in between again')
  end
  local why = 'the checkpoint of step ' .. integer(committed) .. ' was lost'
  for _, name in ipairs(call('HKEYS', STEPS)) do
    if tonumber(name) > step then
      local ids = {}
      for id in string.gmatch(call('HGET', STEPS, name), '%S+') do
        ids[#ids + 1] = id
      end
      give_back(ids, why)
      call('HDEL', STEPS, name)
    end
  end
  for _, later in ipairs(steps) do
    local ids = {}
    for at, item in ipairs(claim_of(later).groups) do
      ids[at] = item[1]
    end
    give_back(ids, why)
    call('HDEL', CLAIMS, integer(later))
  end
  call('HSET', META, 'committed_step', integer(step))
  return {}
end

if step > math.max(committed, steps[#steps] or 0) then
  refuse('FAILED_PRECONDITION', 'the trainer was loaded from step ' .. ARGV[2] .. ', which the ledger of run ' .. RUN
    .. ' does not know (its newest is ' .. integer(math.max(committed, steps[#steps] or 0))
    .. '); restore the ledger from that checkpoint first')
end
local replay = {}
for _, recorded in ipairs(steps) do
  local claim = claim_of(recorded)
  if recorded <= step then
    train(recorded, claim)
  else
    replay[#replay + 1] = recorded
    for _, item in ipairs(claim.groups) do
      local group = load(item[1])
      if group.state == 'trained' then
        move(group, 'claimed', 'trainer restarted from step ' .. ARGV[2])
      end
    end
  end
end
return replay
