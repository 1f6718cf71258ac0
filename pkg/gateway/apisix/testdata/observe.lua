-- Runs the plug-in beside stand-ins of the modules that it uses of APISIX and nginx.
-- lua5.1 observe.lua PATH/lameduck.lua
local dict, objects, timers, conf = {}, {}, {}, { observed = true }
local found = { { host = "10.0.3.1", port = 80, weight = 50 } }
local mode, mod = "http", "apisix.discovery.init"

function dict.get(_, key) return dict[key] end
function dict.set(_, key, value) dict[key] = value return true end
function dict.delete(_, key) dict[key] = nil end
function dict.incr(_, key, by, from) dict[key] = (dict[key] or from) + by return dict[key] end
function dict.get_keys() return {} end
ngx = {
    shared = { lameduck = dict }, now = function() return 7 end, get_phase = function() return "init_worker" end,
    worker = { pid = function() return 42 end, id = function() return 0 end },
    timer = { at = function() end, every = function(_, run) timers[1] = run end },
}
package.loaded[mod] = { discovery = { kubernetes = { nodes = function(name)
    assert(name == "shop/web:http", name)
    return found
end } } }
local function iterate(values) return ipairs(values) end
package.loaded["apisix.core"] = {
    json = { encode = function(v) return v end, decode = function(v) return v end },
    table = table,
    utils = { parse_addr = function(text)
        local host, port = text:match("^(.*):(%d+)$")
        return host or text, tonumber(port)
    end },
    config = {
        fetch_created_obj = function(kind) return objects[kind] end,
        local_conf = function() return { apisix = { proxy_mode = mode } } end,
    },
    config_util = { iterate_values = iterate },
}
package.loaded["apisix.upstream"] = { upstreams = function()
    return objects["/upstreams"] and objects["/upstreams"].values
end }
package.loaded["apisix.global_rules"] = { global_rules = function()
    return { { value = { plugins = { lameduck = conf } } } }
end }

-- set replaces the objects of a kind.
local function set(kind, ...)
    local values = {}
    for i, value in ipairs({ ... }) do
        values[i] = { value = value }
    end
    objects[kind] = { values = values, conf_version = ((objects[kind] or {}).conf_version or 0) + 1 }
end

-- is compares what the process reports with words: ADDRESS=REPORT.
local function is(want)
    timers[1]()
    local all = {}
    for node, out in pairs(dict["w:42"].nodes or {}) do
        all[#all + 1] = node .. "=" .. out
    end
    table.sort(all)
    local got = table.concat(all, " ")
    assert(got == want, "it reports " .. got .. ", want " .. want)
end

local plugin = dofile(arg[1])
plugin.init()

-- Each place that may have nodes, in each form; weight 0 gets retries, so it is listed.
local upstream = { nodes = { { host = "10.0.0.1", port = 80, weight = 0 }, { host = "fd00::1", port = 9, weight = 1 } } }
upstream.parent = { upstream }
set("/upstreams", upstream)
set("/routes", { upstream = { nodes = { ["10.0.0.2:80"] = 1 } } })
set("/services", { upstream = { nodes = { { host = "10.0.0.3", weight = 1 } } } })
set("/plugin_configs", { plugins = { ["traffic-split"] = { rules = { { weighted_upstreams = {
    { upstream = { nodes = { { host = "10.0.0.4", port = 80, weight = 1 } } }, weight = 1 },
} } } } } })
set("/consumers", { plugins = { any = { nodes = { { host = "10.0.0.5", port = 80 } } } } })
set("/consumer_groups", { plugins = { any = { nodes = { { host = "10.0.0.6", port = 80 } } } } })
set("/global_rules", { plugins = { any = { nodes = { { host = "web.shop", port = 80 } } } } })
is("10.0.0.1:80=0 10.0.0.2:80=0 10.0.0.3:443=0 10.0.0.3:80=0 10.0.0.4:80=0 10.0.0.5:80=0 10.0.0.6:80=0 " ..
    "[fd00::1]:9=0 web.shop:80=0")
for kind in pairs(objects) do
    set(kind)
end
is("10.0.0.1:80=2 10.0.0.2:80=2 10.0.0.3:443=2 10.0.0.3:80=2 10.0.0.4:80=2 10.0.0.5:80=2 10.0.0.6:80=2 " ..
    "[fd00::1]:9=2 web.shop:80=2")
is("")

-- A name that was resolved is a name. A node stays listed while a request may be sent to it.
set("/upstreams", { dns_nodes = { { host = "web.shop", port = 80 } }, nodes = { { host = "10.0.0.7", port = 80 } } },
    { nodes = { { host = "10.0.0.8", port = 80 } } })
is("10.0.0.8:80=0 web.shop:80=0") -- the 4th report
local early, late = {}, {}
plugin.rewrite(conf, early)
assert(dict["g:42 * 4"] == 1)
set("/upstreams")
is("10.0.0.8:80=5 web.shop:80=5")
plugin.rewrite(conf, late)
plugin.rewrite(conf, late)
assert(dict["g:42 * 5"] == 1)
is("10.0.0.8:80=5 web.shop:80=5")
plugin.log(conf, early)
assert(dict["g:42 * 4"] == nil)
is("") -- the 7th
plugin.log(conf, late)

-- discovery.kubernetes is asked at each report: no version says when its answer changes.
set("/routes", { upstream = { discovery_type = "kubernetes", service_name = "shop/web:http",
    nodes = { { host = "10.0.0.9", port = 80 } } } })
is("10.0.3.1:80=0")
assert(dict["w:42"].discovers and dict["w:42"].unlisted == "")
found = nil
is("10.0.3.1:80=9")
set("/routes", { upstream = { discovery_type = "consul", service_name = "web" } })
mode = "http&stream"
is("")
assert(dict["w:42"].unlisted == "consul web, stream routes", dict["w:42"].unlisted)
mode = "http"
set("/routes", { upstream = { nodes = { ["10.0.0.2:80"] = 1 } } })
is("10.0.0.2:80=0") -- the 11th

-- A request reports first what was not reported when it came.
set("/routes", { upstream = { nodes = { ["10.0.0.2:80"] = 1, ["10.0.0.3:80"] = 1 } } })
plugin.rewrite(conf, late) -- the 12th
assert(dict["w:42"].nodes["10.0.0.3:80"] == 0 and dict["g:42 * 12"] == 1)
set("/routes", { upstream = { nodes = { ["10.0.0.2:80"] = 1 } } })
is("10.0.0.2:80=0 10.0.0.3:80=13")
plugin.log(conf, late)
is("10.0.0.2:80=0") -- the 14th

-- A reload of the plug-ins runs the file again, while the timer of the first one goes on.
plugin.rewrite(conf, early)
local first = timers[1]
ngx.get_phase = function() return "timer" end
plugin = dofile(arg[1])
plugin.init()
assert(timers[1] == first)
set("/routes")
is("10.0.0.2:80=15")
plugin.rewrite(conf, late)
assert(dict["g:42 * 15"] == 1)
plugin.log(conf, early)
is("")

-- Without the word in the rule nothing is listed, and no request is counted.
conf = {}
timers[1]()
assert(dict["w:42"].nodes == nil and dict["w:42"].counting)
plugin.rewrite(conf, early)
assert(early.lameduck_began == nil)

-- What a full dictionary drops may be of any process that runs then. Later ones lose nothing by it.
local started = { [1] = 100, [42] = 101, [43] = 102 }
io.open = function(path)
    local pid, text = tonumber(path:match("%d+")), "nginx"
    if path:match("/stat$") then
        text = started[pid] and pid .. " (nginx) S 1 " .. ("0 "):rep(17) .. started[pid]
    elseif path:match("/children$") then
        text = ""
        for child in pairs(started) do
            text = child == 1 and text or text .. child .. " "
        end
    end
    return text and { read = function() return text end, close = function() end }
end
local function lost()
    local status, out = plugin.control_api()[1].handler()
    assert(status == 200)
    return out.lost
end
local function overflow()
    local incr = dict.incr
    dict.incr = function() return 1, nil, true end
    plugin.rewrite({ observed = true }, {})
    dict.incr = incr
end
assert(not lost())
overflow()
assert(lost())
started[50], started[42] = 200, nil -- APISIX is reloaded, and 43 still has requests
ngx.worker.pid = function() return 50 end
assert(lost(), "43 was there")
started[43] = nil
assert(not lost(), "no process that was there runs any more")
overflow()
assert(lost())
dict:set("lost", true) -- by the plug-in before a reload, which wrote no time
assert(lost())
