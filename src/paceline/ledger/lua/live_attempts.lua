-- ARGV: identity, group ids. Returns the present attempt of each group that is in flight, or trained and not committed;
-- 0 for the others.
need_ledger()
local found = {}
for at = 2, #ARGV do
  local text = call('HGET', LIVE, ARGV[at])
  found[at - 1] = text and cjson.decode(string.match(text, '^[^\n]*'))[2] or 0
end
return found
