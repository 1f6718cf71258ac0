-- lameduck: what each process of this APISIX routes by, and which requests run in it.
-- GET /v1/plugin/lameduck of the control API answers with
--   processes  the children of the master, by pid: title, start, and what each last reported
--   picks      requests that run, by "PID ID VERSION": the process, and the upstream with the
--              version that the request took its picker from. A request keeps its picker for its
--              retries, and has one before it has a connection: counting by node misses both.
--   lost       the shared dictionary was full, so that picks are missing
-- Only upstreams with the label "lameduck" are in it. The plug-in has to be a global rule.
local core = require("apisix.core")
local upstreams = require("apisix.upstream").upstreams
local global_rules = require("apisix.global_rules").global_rules
local ngx, ipairs, io, tostring = ngx, ipairs, io, tostring

local name = "lameduck"
local _M = { version = 0.1, priority = 30000, name = name, schema = { type = "object", properties = {} } }
local dict = ngx.shared[name]

function _M.check_schema(conf)
    return core.schema.check(_M.schema, conf)
end

-- ours returns the id of an upstream that an agent directs.
local function ours(conf)
    return conf and conf.labels and conf.labels[name] and conf.id
end

-- counting reports whether every request runs through this plug-in. APISIX itself adds a _meta.
local function counting()
    for _, rule in core.config_util.iterate_values(global_rules() or {}) do
        local conf = rule.value and rule.value.plugins and rule.value.plugins[name]
        local meta = conf and conf._meta or {}
        if conf and not meta.disable and not meta.filter then
            return true
        end
    end
    return false
end

local function publish(premature)
    if premature then
        return
    end
    local out = {}
    for _, upstream in core.config_util.iterate_values(upstreams() or {}) do
        local id = ours(upstream.value)
        if id then
            local nodes = {}
            for _, node in ipairs(upstream.value.nodes or {}) do
                local host = node.host
                if host:find(":", 1, true) and host:sub(1, 1) ~= "[" then
                    host = "[" .. host .. "]"
                end
                nodes[host .. ":" .. (node.port or 0)] = node.weight
            end
            out[id] = { version = upstream.value.resource_version or 0, nodes = nodes }
        end
    end
    local report = { at = ngx.now(), counting = counting(), upstreams = out }
    local _, _, forcible = dict:set("w:" .. ngx.worker.pid(), core.json.encode(report))
    if forcible then
        dict:set("lost", true)
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

-- before_proxy runs once a request has its picker, and again before each retry.
function _M.before_proxy(_, ctx)
    local conf = ctx.upstream_conf
    local id = ours(conf)
    if ctx.lameduck_pick or not id then
        return
    end
    ctx.lameduck_pick = "g:" .. ngx.worker.pid() .. " " .. id .. " " .. (conf.resource_version or 0)
    local _, err, forcible = dict:incr(ctx.lameduck_pick, 1, 0)
    if err or forcible then
        dict:set("lost", true)
    end
end

function _M.log(_, ctx)
    local pick = ctx.lameduck_pick
    ctx.lameduck_pick = nil
    -- Only this process writes its keys.
    if pick and (dict:incr(pick, -1) or 0) <= 0 then
        dict:delete(pick)
    end
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
    local out = { now = ngx.now(), answered = ngx.worker.pid(), processes = {}, picks = {}, lost = dict:get("lost") }
    out.master = process(out.answered)
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
        end
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
