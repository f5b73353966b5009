-- ARGV: identity, dataset_size, epochs, ledger_id. Creates the ledger, or checks that it is for the same data.
local size, epochs = tonumber(ARGV[2]), tonumber(ARGV[3])
if call('HEXISTS', META, 'ledger_id') == 1 then
  if meta('dataset_size') ~= size then
    refuse('FAILED_PRECONDITION', 'run ' .. RUN .. ' was started with a data set of ' .. integer(meta('dataset_size'))
      .. ' prompts, now it has ' .. integer(size) .. '; restore the data or start a run of another name')
  end
  if size * epochs < meta('cursor') then
    refuse('FAILED_PRECONDITION', 'run ' .. RUN .. ' has issued ' .. integer(meta('cursor')) .. ' groups, more than '
      .. integer(epochs) .. ' epochs of ' .. integer(size) .. ' prompts; raise data.epochs')
  end
  if meta('epochs') ~= epochs then
    call('HSET', META, 'epochs', integer(epochs))
    ring(true)
  end
  return 0
end
call('HSET', META, 'ledger_id', ARGV[4], 'lineage', ARGV[4], 'dataset_size', integer(size), 'epochs', integer(epochs),
  'cursor', '0', 'issued', '0', 'sequence', '0', 'committed_step', '0', 'refused_stale', '0', 'refused_pending', '0')
call('DEL', SAMPLES)
call('XGROUP', 'CREATE', SAMPLES, CONSUMERS, '0', 'MKSTREAM')
ring(true)
return 1
