-- ARGV: identity, group id, attempt, error, max_attempts.
need_ledger()
local group = load(ARGV[2])
if not group or group.attempt ~= tonumber(ARGV[3]) then
  return 'stale_attempt'
end
if group.state == 'dead' then
  return 'dead'
elseif group.state ~= 'generating' then
  return 'stale_attempt'
end
group.failures = group.failures + 1
if group.failures >= tonumber(ARGV[5]) then
  move(group, 'dead', ARGV[4])
  return 'dead'
end
move(group, 'waiting', 'failed: ' .. ARGV[4])
return 'reissued'
