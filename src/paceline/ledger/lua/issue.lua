-- ARGV: identity, owner, count, lease seconds, ceiling (-1: none), request id. Returns id, attempt, id, attempt, ...
need_ledger()
local owner, count, ceiling, request = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[5]), ARGV[6]
local lease = NOW + tonumber(ARGV[4])

-- The reply of the last call may have been lost; the same request gets what is left of the same groups.
local last = call('HGET', ISSUES, owner)
if last then
  last = cjson.decode(last)
  if last[1] == request then
    local same = {}
    for at = 2, #last, 2 do
      local group = load(last[at])
      if group and group.state == 'generating' and group.attempt == last[at + 1] and group.owner == owner then
        call('ZADD', LEASES, string.format('%.6f', lease), group.id)
        same[#same + 1] = group.id
        same[#same + 1] = integer(group.attempt)
      end
    end
    if #same > 0 then
      return same
    end
  end
end

local issued = {}
local function hand_out(group)
  group.owner, group.lease = owner, lease
  move(group, 'generating', 'attempt ' .. integer(group.attempt) .. ' by ' .. owner)
  issued[#issued + 1] = group.id
  issued[#issued + 1] = integer(group.attempt)
  count = count - 1
end

if count > 0 then
  for _, id in ipairs(call('ZRANGE', WAITING, 0, count - 1)) do
    hand_out(load(id))
  end
end

local size, cursor, occupied = meta('dataset_size'), meta('cursor'), meta('issued') - meta('n:dead')
local fields = call('HGETALL', META)
for at = 1, #fields, 2 do
  if string.sub(fields[at], 1, 8) == 'dropped:' then
    occupied = occupied - tonumber(fields[at + 1])
  end
end
local last_cursor = size * meta('epochs')
while count > 0 and cursor < last_cursor and (ceiling < 0 or occupied < ceiling) do
  local epoch = math.floor(cursor / size)
  local group = blank('e' .. integer(epoch) .. '.' .. integer(cursor - epoch * size))
  cursor, occupied = cursor + 1, occupied + 1
  call('HINCRBY', META, 'cursor', 1)
  call('HINCRBY', META, 'issued', 1)
  hand_out(group)
end

local record = {request}
for at = 1, #issued, 2 do
  record[at + 1], record[at + 2] = issued[at], tonumber(issued[at + 1])
end
if #issued > 0 then
  call('HSET', ISSUES, owner, cjson.encode(record))
end
return issued
