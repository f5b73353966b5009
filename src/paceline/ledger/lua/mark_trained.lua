-- ARGV: identity, step.
need_trainer()
local step = tonumber(ARGV[2])
local claim = claim_of(step)
if claim then
  train(step, claim)
elseif step > meta('committed_step') then
  refuse('FAILED_PRECONDITION', 'step ' .. ARGV[2] .. ' of run ' .. RUN
    .. ' has no recorded claim, so it cannot be trained')
end
return 1
