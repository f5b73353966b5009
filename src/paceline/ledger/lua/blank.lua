-- Shared by the scripts that make records.
local function blank(id)
  return {
    id = id, state = 'none', attempt = 1, failures = 0, owner = '', step = 0,
    entry = '', version = 0, reason = '', refusals = 0, history = '',
  }
end
