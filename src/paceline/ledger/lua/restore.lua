-- ARGV: identity, snapshot (JSON), ledger_id. Puts the ledger back unless it is here and not older.
need_newest_trainer()
local snapshot = cjson.decode(ARGV[2])
local present = call('HMGET', META, 'lineage', 'sequence', 'fence', 'fence_holder')
if present[1] == snapshot.lineage and tonumber(present[2]) >= snapshot.sequence then
  return 0
end
call('DEL', META, LIVE, SETTLED, DEAD, WAITING, LEASES, BUFFER, VERSIONS, CLAIMS, STEPS, SAMPLES, ISSUES)
call('XGROUP', 'CREATE', SAMPLES, CONSUMERS, '0', 'MKSTREAM')
if present[3] then
  call('HSET', META, 'fence', present[3], 'fence_holder', present[4])
end

local committed_step = snapshot.committed_step
call('HSET', META, 'ledger_id', ARGV[3], 'lineage', snapshot.lineage, 'dataset_size', integer(snapshot.dataset_size),
  'epochs', integer(snapshot.epochs), 'cursor', integer(snapshot.cursor), 'issued', integer(snapshot.issued),
  'base_step', integer(committed_step), 'sequence', integer(snapshot.sequence),
  'refused_stale', integer(snapshot.refused_stale), 'refused_pending', '0')
for name, count in pairs(snapshot.settled) do
  call('HSET', META, name, integer(count), 'base:' .. name, integer(count))
end

local by_step = {}
for id, item in pairs(snapshot.groups) do
  local group = blank(id)
  group.attempt, group.failures = item[2], item[3]
  if item[1] == 'trained' then
    -- The checkpoint that carries the snapshot contains the step.
    group.state, group.step = 'committed', item[4]
    committed_step = math.max(committed_step, item[4])
    by_step[item[4]] = by_step[item[4]] or {}
    table.insert(by_step[item[4]], id)
  elseif item[1] == 'dead' then
    group.state = 'dead'
  else
    group.state, group.attempt = 'waiting', item[2] + 1
    call('ZADD', WAITING, ordinal(id), id)
  end
  if COUNTED[group.state] then
    call('HINCRBY', META, 'n:' .. group.state, 1)
  end
  save(group, item[1] == 'dead' and item[5] or 'restored from a checkpoint')
end
for step, ids in pairs(by_step) do
  table.sort(ids)
  call('HSET', STEPS, integer(step), table.concat(ids, ' '))
end
call('HSET', META, 'committed_step', integer(committed_step))
call('HINCRBY', META, 'sequence', 1)
ring(true)
return 1
