-- ARGV: identity, owner. Takes back the leases of the owner, or with an empty owner those that have run out.
need_ledger()
local owner, taken = ARGV[2], {}
local ids
if owner == '' then
  ids = call('ZRANGEBYSCORE', LEASES, '-inf', string.format('%.6f', NOW))
else
  ids = call('ZRANGE', LEASES, 0, -1)
  call('HDEL', ISSUES, owner)
end
for _, id in ipairs(ids) do
  local group = load(id)
  if owner == '' then
    move(group, 'waiting', 'lease of ' .. group.owner .. ' ran out')
    taken[#taken + 1] = id
  elseif group.owner == owner then
    move(group, 'waiting', 'released by ' .. owner)
    taken[#taken + 1] = id
  end
end
return taken
