-- Sets x-affinity, the key of lmcache_cartridge/fleet/affinity.py, where only the body says which cartridges are meant.
-- Envoy has no JSON parser for Lua, so this looks for the fields in the text. A string inside the body cannot be taken
-- for a field, since its quotation marks are escaped. Ids spelt with JSON escapes give no key, or another: a wrong key
-- costs a load.

local SERVED = {} -- models with a colon in their own names: {["qwen:7b"] = true}

local function ids(text)  -- the strings of a list, and the ids of its objects
  local found = {}
  text = text:gsub("%b{}", function(object) return object:match('"id"%s*:%s*("[^"]*")') or "" end)
  for id in text:gmatch('"([^"]*)"') do found[#found + 1] = id end
  return found
end

local function of_model(model)  -- MODEL:handbook,legal@2; a colon of MODEL's own is not the last one
  local names = {}
  if SERVED[model] then return names end
  local rest = model:match("^.+:(s3://.*)$") or model:match("^.+:([^:]+)$")
  if rest == nil or rest:sub(1, 2) == "//" then return names end
  for id in rest:gmatch("[^,]+") do names[#names + 1] = id end
  return names
end

local function named(body)
  local list = body:match('"cartridges"%s*:%s*(%b[])') or body:match('"cartridge_id"%s*:%s*(%b[])')
    or body:match('"cartridge_id"%s*:%s*("[^"]*")')
  if list then return ids(list) end
  return of_model(body:match('"model"%s*:%s*"([^"]*)"') or "")
end

function envoy_on_request(handle)
  local headers = handle:headers()
  headers:remove("x-affinity")
  if headers:get("x-cartridges") or headers:get(":method") ~= "POST" then return end
  local body = handle:body()  -- waits for all of it
  if body == nil then return end
  local key = {}
  for _, id in ipairs(named(body:getBytes(0, body:length()))) do
    key[#key + 1] = id:match("^%s*(.-)%s*$"):gsub("@%d+$", "")
  end
  if #key > 0 then handle:headers():add("x-affinity", table.concat(key, ",")) end
end
