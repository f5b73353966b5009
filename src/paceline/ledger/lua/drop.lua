-- ARGV: identity, group id, attempt, reason.
need_ledger()
local group = load(ARGV[2])
if not group or group.attempt ~= tonumber(ARGV[3]) then
  return 'stale_attempt'
end
if group.state == 'dropped' then
  return 'dropped'
elseif group.state ~= 'generating' then
  return 'stale_attempt'
end
group.reason = ARGV[4]
move(group, 'dropped', ARGV[4])
return 'dropped'
