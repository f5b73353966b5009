-- ARGV: identity, owner, lease seconds. Returns how many leases of the owner now last that long.
need_ledger()
local lease, renewed = string.format('%.6f', NOW + tonumber(ARGV[3])), 0
for _, id in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  if load(id).owner == ARGV[2] then
    call('ZADD', LEASES, lease, id)
    renewed = renewed + 1
  end
end
return renewed
