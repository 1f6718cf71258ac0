-- lameduck: what each process of this APISIX routes by, and which requests run in it.
-- GET /v1/plugin/lameduck of the control API answers with
--   processes  the children of the master, by pid: title, start, and what each last reported
--   picks      requests that run, by "PID ID VERSION": the process, and the upstream with the
--              version that the request took its picker from. A request keeps its picker for its
--              retries, and has one before it has a connection: counting by node misses both.
--   lost       the shared dictionary was full while one of the processes ran, so that picks are missing
-- Only upstreams with the label "lameduck" are in it. The plug-in has to be a global rule. If the
-- rule has {"observed": true}, each process reports all that it sends to, with or without a label:
--   nodes      every address in its objects, with 0 or the number of the first report without it,
--              as long as a request runs that began earlier
--   unlisted   what else it sends to, whose addresses it cannot list
--   discovers  that discovery.kubernetes resolves a Service for it
-- and picks has every request as "PID * NUMBER", by the last report before the request began.
local core = require("apisix.core")
local upstreams = require("apisix.upstream").upstreams
local global_rules = require("apisix.global_rules").global_rules
local ngx, ipairs, pairs, io, math, package, require, tonumber, tostring, type =
    ngx, ipairs, pairs, io, math, package, require, tonumber, tostring, type

local name = "lameduck"
local _M = {
    version = 0.1, priority = 30000, name = name,
    schema = { type = "object", properties = { observed = { type = "boolean" } } },
}
local dict = ngx.shared[name]
local kinds = {
    "/upstreams", "/routes", "/services", "/plugin_configs", "/global_rules", "/consumers", "/consumer_groups",
}
-- state outlives a reload of the plug-ins: what the objects of a kind send to, as of a version; nodes
-- and number of the last report; and how many requests run, by the last report before they began.
local state = package.loaded[name] or { lists = {}, nodes = {}, number = 0, running = {} }
package.loaded[name] = state

function _M.check_schema(conf)
    return core.schema.check(_M.schema, conf)
end

-- lose records that the shared dictionary was full: what was dropped may be of any process that runs
-- now. 0: report has yet to find out when the newest of them was started.
local function lose()
    dict:set("lost", 0)
end

-- ours returns the id of an upstream that an agent directs.
local function ours(conf)
    return conf and conf.labels and conf.labels[name] and conf.id
end

-- address returns HOST:PORT.
local function address(host, port)
    if host:find(":", 1, true) and host:sub(1, 1) ~= "[" then
        host = "[" .. host .. "]"
    end
    return host .. ":" .. port
end

-- rule returns the configuration by which every request runs through this plug-in. APISIX itself
-- adds a _meta.
local function rule()
    for _, object in core.config_util.iterate_values(global_rules() or {}) do
        local conf = object.value and object.value.plugins and object.value.plugins[name]
        local meta = conf and conf._meta or {}
        if conf and not meta.disable and not meta.filter then
            return conf
        end
    end
end

-- add adds the addresses of nodes: a list, or weights by address. The scheme of a request decides
-- the port of a node without one.
local function add(set, list)
    for key, node in pairs(list) do
        local host, port
        if type(node) == "table" then
            host, port = node.host, node.port
        elseif type(key) == "string" then
            host, port = core.utils.parse_addr(key)
        end
        if host then
            set[address(host, port or 80)] = true
            set[address(host, port or 443)] = true
        end
    end
end

-- walk adds what a value sends to, at any depth: a plug-in may have upstreams in its configuration.
-- The nodes of a name are those that the last request resolved.
local function walk(list, value, seen)
    if seen[value] then
        return
    end
    seen[value] = true
    local set = value.dns_nodes or value.nodes
    if value.service_name and value.discovery_type then
        list.services[value.discovery_type .. " " .. value.service_name] = value
    elseif type(set) == "table" then
        add(list.nodes, set)
    end
    for _, v in pairs(value) do
        if type(v) == "table" then
            walk(list, v, seen)
        end
    end
end

-- observe adds to a report all that this process sends to.
local function observe(report)
    local discovery = require("apisix.discovery.init").discovery
    local set, unlisted = {}, {}
    for _, kind in ipairs(kinds) do
        local objects = core.config.fetch_created_obj(kind) or {}
        local list = state.lists[kind]
        if not list or list.version ~= objects.conf_version then
            list = { version = objects.conf_version, nodes = {}, services = {} }
            local seen = {}
            for _, object in core.config_util.iterate_values(objects.values or {}) do
                walk(list, object.value, seen)
            end
            state.lists[kind] = list
        end
        for node in pairs(list.nodes) do
            set[node] = true
        end
        for service, conf in pairs(list.services) do
            if conf.discovery_type == "kubernetes" and discovery.kubernetes then
                report.discovers = true
                add(set, discovery.kubernetes.nodes(conf.service_name) or {})
            else
                unlisted[#unlisted + 1] = service
            end
        end
    end
    local mode = core.config.local_conf().apisix.proxy_mode
    if mode and mode ~= "http" then
        unlisted[#unlisted + 1] = "stream routes"
    end
    state.number = state.number + 1
    local nodes, oldest = state.nodes, state.number
    for began in pairs(state.running) do
        oldest = math.min(oldest, began)
    end
    for node in pairs(set) do
        nodes[node] = 0
    end
    for node, out in pairs(nodes) do
        if not set[node] and out == 0 then
            nodes[node] = state.number
        elseif not set[node] and out <= oldest then
            nodes[node] = nil
        end
    end
    report.nodes, report.unlisted = nodes, core.table.concat(unlisted, ", ")
end

local function publish(premature)
    if premature then
        return
    end
    local out = {}
    for _, upstream in core.config_util.iterate_values(upstreams() or {}) do
        local id = ours(upstream.value)
        if id then
            local weights = {}
            for _, node in ipairs(upstream.value.nodes or {}) do
                weights[address(node.host, node.port or 0)] = node.weight
            end
            out[id] = { version = upstream.value.resource_version or 0, nodes = weights }
        end
    end
    local conf = rule()
    local report = { at = ngx.now(), counting = conf ~= nil, upstreams = out }
    if conf and conf.observed then
        observe(report)
    end
    local _, _, forcible = dict:set("w:" .. ngx.worker.pid(), core.json.encode(report))
    if forcible then
        lose()
    end
end

function _M.init()
    if ngx.get_phase() ~= "init_worker" or not ngx.worker.id() then
        return
    end
    for _, key in ipairs(dict:get_keys(0)) do -- of an earlier process with this pid
        if key:sub(3):match("^%d+") == tostring(ngx.worker.pid()) then
            dict:delete(key)
        end
    end
    ngx.timer.at(0, publish)
    ngx.timer.every(0.1, publish)
end

-- count counts a request, and returns the key by which it is counted.
local function count(what)
    local key = "g:" .. ngx.worker.pid() .. " " .. what
    local _, err, forcible = dict:incr(key, 1, 0)
    if err or forcible then
        lose()
    end
    return key
end

-- forget ends what count began. Only this process writes its keys.
local function forget(key)
    if key and (dict:incr(key, -1) or 0) <= 0 then
        dict:delete(key)
    end
end

-- rewrite runs before all other plug-ins, at once after a route was found: what that has was
-- reported before the request is counted.
function _M.rewrite(conf, ctx)
    if conf.observed and not ctx.lameduck_began then
        for _, kind in ipairs(kinds) do
            local objects, list = core.config.fetch_created_obj(kind), state.lists[kind]
            if not list or objects and objects.conf_version ~= list.version then
                publish()
                break
            end
        end
        local began = state.number
        ctx.lameduck_began, ctx.lameduck_request = began, count("* " .. began)
        state.running[began] = (state.running[began] or 0) + 1
    end
end

-- before_proxy runs once a request has its picker, and again before each retry.
function _M.before_proxy(_, ctx)
    local conf = ctx.upstream_conf
    local id = ours(conf)
    if ctx.lameduck_pick or not id then
        return
    end
    ctx.lameduck_pick = count(id .. " " .. (conf.resource_version or 0))
end

function _M.log(_, ctx)
    forget(ctx.lameduck_pick)
    forget(ctx.lameduck_request)
    local began = ctx.lameduck_began
    if began then
        state.running[began] = state.running[began] > 1 and state.running[began] - 1 or nil
    end
    ctx.lameduck_pick, ctx.lameduck_request, ctx.lameduck_began = nil, nil, nil
end

local function read(path)
    local file = io.open(path)
    local text = file and file:read("*a")
    if file then
        file:close()
    end
    return text
end

-- process returns the parent of a process and when it was started, in ticks; nil if it has ended.
local function process(pid)
    local state, parent, rest = (read("/proc/" .. pid .. "/stat") or ""):match("%) (%S) (%d+) ([^)]*)$")
    if not state or state == "Z" then
        return nil
    end
    local field = 4
    for value in rest:gmatch("%S+") do
        field = field + 1
        if field == 22 then
            return parent, value
        end
    end
end

local function report()
    local out = { now = ngx.now(), processes = {}, picks = {} }
    local lost, newest = dict:get("lost"), 0
    out.master = process(ngx.worker.pid())
    local _, started = process(out.master)
    out.started = started
    local children = read("/proc/" .. out.master .. "/task/" .. out.master .. "/children")
    if not children then
        return 500, { error_msg = "the kernel does not list the processes of the master" }
    end
    for pid in children:gmatch("%d+") do
        local _, start = process(pid)
        if start then
            local title = (read("/proc/" .. pid .. "/cmdline") or ""):gsub("%z", " "):gsub("%s+$", "")
            local last = dict:get("w:" .. pid)
            out.processes[pid] = { title = title, started = start, report = last and core.json.decode(last) }
            newest = math.max(newest, tonumber(start))
        end
    end
    if lost == 0 or lost == true then -- true: the plug-in before a reload wrote it
        lost = newest
        dict:set("lost", lost)
    end
    for _, p in pairs(out.processes) do
        out.lost = out.lost or lost and tonumber(p.started) <= lost
    end
    for _, key in ipairs(dict:get_keys(0)) do
        local pid = key:sub(3):match("^%d+")
        if pid and not out.processes[pid] then
            dict:delete(key)
        elseif key:sub(1, 2) == "g:" then
            out.picks[key:sub(3)] = dict:get(key)
        end
    end
    return 200, out
end

function _M.control_api()
    return { { methods = { "GET" }, uris = { "/v1/plugin/" .. name }, handler = report } }
end

return _M
