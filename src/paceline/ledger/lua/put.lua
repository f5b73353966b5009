-- ARGV: identity, group id, attempt, capacity, oldest version, traceparent, payload. Returns {outcome, buffered}.
need_ledger()
local id = ARGV[2]
local group = load(id)
if not group or group.attempt ~= tonumber(ARGV[3]) then
  return {'stale_attempt', 0}
end
local state = group.state
if state == 'buffered' or state == 'claimed' or state == 'trained' or state == 'committed' then
  return {'duplicate', 0}
elseif state ~= 'generating' then
  return {'stale_attempt', 0}
end
local buffered = call('ZCARD', BUFFER)
if buffered >= tonumber(ARGV[4]) then
  return {'full', buffered}
end
group.version = tonumber(ARGV[5])
group.entry = call('XADD', SAMPLES, '*', 'group_id', id, 'payload', ARGV[7], 'traceparent', ARGV[6],
  'oldest_version', ARGV[5])
move(group, 'buffered', 'attempt ' .. ARGV[3] .. ', weight version ' .. ARGV[5])
return {'accepted', buffered + 1}
