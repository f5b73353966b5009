-- ARGV: identity, group id, attempt, error, max_attempts (0: not the prompt's fault, so not counted).
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
local most = tonumber(ARGV[5])
if most > 0 then
  group.failures = group.failures + 1
  if group.failures >= most then
    move(group, 'dead', ARGV[4])
    return 'dead'
  end
end
move(group, 'waiting', 'failed: ' .. ARGV[4])
return 'reissued'
