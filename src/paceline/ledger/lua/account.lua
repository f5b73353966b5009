-- ARGV: identity, recount (0 or 1). Returns the meta hash, and the same counts made anew from the records.
need_ledger()
local counts = {}
local fields = all_meta()
if ARGV[2] == '1' then
  local function add(name, by)
    counts[name] = (counts[name] or 0) + by
  end
  for at = 1, #fields, 2 do
    if string.sub(fields[at], 1, 5) == 'base:' then
      add(string.sub(fields[at], 6), tonumber(fields[at + 1]))
    end
  end
  for _, home in ipairs({LIVE, SETTLED, DEAD}) do
    for _, text in ipairs(call('HVALS', home)) do
      local head = cjson.decode(string.match(text, '^[^\n]*'))
      add(head[1] == 'dropped' and 'dropped:' .. head[8] or 'n:' .. head[1], 1)
    end
  end
  counts['stream'] = call('XLEN', SAMPLES)
end
local flat = {}
for name, value in pairs(counts) do
  flat[#flat + 1] = name
  flat[#flat + 1] = integer(value)
end
return {fields, flat}
