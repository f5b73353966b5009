-- ARGV: identity. Returns the meta hash, the live records, the dead records: what a checkpoint keeps.
need_ledger()
return {all_meta(), call('HGETALL', LIVE), call('HGETALL', DEAD)}
