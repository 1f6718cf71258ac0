-- What one worker routes by, for an APISIX without the plug-in: the function of a route with
-- serverless-pre-function. It answers as the plug-in does, with the report of the worker that took
-- the connection, and counts no requests. Only callers on the loopback get it.
return function()
    local core = require("apisix.core")
    if ngx.var.remote_addr ~= "127.0.0.1" and ngx.var.remote_addr ~= "::1" then
        return 404
    end
    local function read(path)
        local file = io.open(path)
        local text = file and file:read("*a")
        if file then
            file:close()
        end
        return text
    end
    local function process(pid) -- its parent, and when it was started
        local state, parent, rest = (read("/proc/" .. pid .. "/stat") or ""):match("%) (%S) (%d+) ([^)]*)$")
        local field = 4
        for value in (state and state ~= "Z" and rest or ""):gmatch("%S+") do
            field = field + 1
            if field == 22 then
                return parent, value
            end
        end
    end
    local out = { answered = ngx.worker.pid(), processes = {} }
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
            out.processes[pid] = { title = title, started = start }
        end
    end
    local upstreams = {}
    for _, upstream in core.config_util.iterate_values(require("apisix.upstream").upstreams() or {}) do
        local conf = upstream.value
        if conf.labels and conf.labels.lameduck then
            local nodes = {}
            for _, node in ipairs(conf.nodes or {}) do
                local host = node.host
                if host:find(":", 1, true) and host:sub(1, 1) ~= "[" then
                    host = "[" .. host .. "]"
                end
                nodes[host .. ":" .. (node.port or 0)] = node.weight
            end
            upstreams[conf.id] = { version = conf.resource_version or 0, nodes = nodes }
        end
    end
    out.now = ngx.now()
    local own = out.processes[tostring(out.answered)]
    if own then
        own.report = { at = out.now, upstreams = upstreams }
    end
    return 200, out
end
