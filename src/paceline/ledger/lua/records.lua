-- A record of a group that was never issued.
local function blank(id)
  return {
    id = id, state = 'none', attempt = 1, failures = 0, owner = '', step = 0,
    entry = '', version = 0, reason = '', refusals = 0, history = '',
  }
end

-- The meta hash, and the counts that the indexes keep, as name, value, name, value, ...
local function all_meta()
  local fields = call('HGETALL', META)
  for name, index in pairs({waiting = WAITING, generating = LEASES, buffered = BUFFER}) do
    fields[#fields + 1] = 'n:' .. name
    fields[#fields + 1] = integer(call('ZCARD', index))
  end
  return fields
end
