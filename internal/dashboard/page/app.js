// The page draws each view as it comes, whole: there is no state but the last one. Rows that say the same as before are left alone, so that
// nothing flickers, nothing is read out twice, and a selection stays.

const silence = 6000; // ms without an answer until the connection counts as lost
const every = 250; // ms between an answer and the next question
const retry = 1000;
const shown = 10; // outcomes before "show all"

const $ = (id) => document.getElementById(id);
let token = '';
let view = null;
let drawn = ''; // the view without its time, to see what is new
let skew = 0; // the replica's clock minus ours
let seen = 0; // our clock, when the last word came
let live = false;
let fault = ''; // why there was no answer
let allOutcomes = false;
let allHealth = false;
let waiting = null; // what ends the wait before the next try
let namespace = (location.hash.match(/^#namespace=([a-z0-9-]+)$/) || ['', ''])[1]; // the only one whose rows are shown

// --- the views

async function follow() {
  for (;;) {
    let pause = every;
    try {
      const response = await fetch('v1/view?replicas=all', { headers: authorization(), signal: AbortSignal.timeout(silence), cache: 'no-store' });
      if (response.status === 401 || response.status === 403) {
        await askToken(response);
        continue;
      }
      if (!response.ok) throw new Error(await failure(response));
      take(await response.json());
    } catch (e) {
      // Whatever it was: it is tried again, and the page says since when it knows nothing.
      fault = ': ' + e.message;
      setLive(false);
      pause = retry;
    }
    await new Promise((resolve) => { waiting = resolve; setTimeout(resolve, pause); });
  }
}

function authorization() { return token ? { Authorization: 'Bearer ' + token } : {}; }

async function failure(response) {
  try { return (await response.json()).error; } catch { return 'HTTP ' + response.status; }
}

function take(said) {
  seen = Date.now();
  fault = '';
  skew = Date.parse(said.at) - seen;
  setLive(true);
  const at = said.at;
  said.at = '';
  const same = JSON.stringify(said);
  const news = view === null || same !== drawn;
  drawn = same;
  if (news) view = filled(said);
  view.at = at;
  // A fault of ours must not look like a connection that is lost.
  try {
    if (news) draw();
    else { drawVerdict(view); drawTiles(view); announce(view); } // time passes: an agent becomes late, and what went wrong is long ago
  } catch (e) { reportError(e); }
}

// filled gives a view what a replica of the version before does not tell: a page outlives its replica, and goes on with another one.
function filled(v) {
  v.barriers = { open: 0, items: [], hooks: 0, missing: 0, missingPods: [], ...v.barriers };
  v.barriers.waiting ??= v.barriers.open - v.barriers.items.filter((b) => b.phase === 'Released').length;
  v.with ??= [];
  v.silent ??= [];
  v.targetHealth = { reported: false, agents: 0, untold: 0, known: 0, all: {}, services: [], ...v.targetHealth };
  return v;
}

function setLive(now) {
  if (now) {
    $('token-form').hidden = true;
    $('main').hidden = false;
  }
  if (now !== live || now) {
    document.body.classList.toggle('lost', !now && view !== null);
    $('lost').hidden = now || view === null;
    const text = 'Connection lost. If you came by kubectl port-forward, it ended with the pod that it led to: start it again.';
    if (!now && $('lost').textContent !== text) $('lost').textContent = text;
  }
  if (!now && live) drawLost();
  live = now;
  tick();
}

async function askToken(response) {
  const had = token !== '';
  token = '';
  fault = '';
  view = null;
  live = false;
  $('main').hidden = true;
  $('token-form').hidden = false;
  $('token-error').textContent = had ? await failure(response) : '';
  tick();
  $('token').focus();
  token = await new Promise((resolve) => {
    $('token-form').onsubmit = (e) => {
      e.preventDefault();
      resolve($('token').value.trim());
      $('token').value = '';
    };
  });
}

// --- small things

function el(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    e.setAttribute(name, value === true ? '' : value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined && c !== ''));
  return e;
}

const svgSpace = 'http://www.w3.org/2000/svg';
function svg(tag, attributes, text) {
  const e = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  if (text !== undefined) e.textContent = text;
  return e;
}

function set(id, text) {
  if ($(id).textContent !== String(text)) $(id).textContent = text;
}

function duration(seconds) {
  if (seconds < 0) seconds = 0;
  if (seconds < 0.9995) return (seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0) + ' ms';
  if (seconds < 100) return seconds.toFixed(1) + ' s';
  if (seconds < 7200) return Math.round(seconds / 60) + ' min';
  if (seconds < 172800) return Math.round(seconds / 3600) + ' h';
  return Math.round(seconds / 86400) + ' d';
}

// whole is for what ticks: no tenths that only flicker.
function whole(seconds) {
  return seconds < 100 ? Math.max(0, Math.floor(seconds)) + ' s' : duration(seconds);
}

function plural(n, one, many) { return n + ' ' + (n === 1 ? one : many); }

function age(since, after) {
  return el('span', { class: 'age', 'data-since': since, 'data-after': after || '' });
}

// until is what counts down.
function until(at, before, after) {
  return el('span', { class: 'age', 'data-until': at, 'data-before': before, 'data-after': after || '' });
}

const dated = new Intl.DateTimeFormat(undefined, { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit', timeZoneName: 'short' });
function clock(at) {
  return el('time', { datetime: at, title: at }, dated.format(new Date(at)));
}

function chip(kind, text, title) { return el('span', { class: 'chip ' + kind, title }, text); }

// rows draws a table's rows, each by its key; one whose item is as before is left alone. Of items with the same key it draws the first.
function rows(table, items, key, cells) {
  const body = table.tBodies[0];
  const had = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const keys = new Set();
  let at = body.firstElementChild;
  for (const item of items) {
    const k = key(item), sign = JSON.stringify(item);
    if (keys.has(k)) continue;
    keys.add(k);
    let row = had.get(k);
    had.delete(k);
    if (!row) row = el('tr', { role: 'row', 'data-key': k });
    if (row.dataset.sign !== sign) {
      row.dataset.sign = sign;
      row.replaceChildren(...cells(item));
    }
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  }
  for (const row of had.values()) row.remove();
  table.hidden = items.length === 0;
}

function head(...children) { return el('th', { role: 'rowheader', scope: 'row' }, ...children); }
function cell(label, kind, ...children) {
  const blank = children.every((c) => c === '' || c === null || c === undefined);
  return el('td', { role: 'cell', 'data-label': label, class: (kind + (blank ? ' blank' : '')).trim() || null }, ...children);
}

// podName is a pod, and leads to what would happen if it were deleted.
function podName(item) { return [el('a', { href: '#explain', 'data-explain': item.namespace + '/' + item.pod }, el('span', { class: 'ns' }, item.namespace + '/'), item.pod)]; }

// chosen are the items of the namespace that is shown.
function chosen(items) { return namespace ? items.filter((i) => i.namespace === namespace) : items; }

// --- what is drawn

function draw() {
  const v = view;
  set('replica', 'Answered by ' + v.replica.name + (v.replica.stopping ? ', which is shutting down' : '') + (v.with.length ? ', with what ' + v.with.join(' and ') + (v.with.length === 1 ? ' knows' : ' know') : '') +
    (v.silent.length ? '. No answer from ' + v.silent.join(' and ') : ''));
  $('replica').title = 'It began ' + new Date(v.replica.started).toLocaleString();
  document.title = (v.drains.open ? '(' + v.drains.open + ') ' : '') + 'Lameduck';
  drawVerdict(v);
  drawTiles(v);
  drawNamespaces(v);
  drawRollouts(v);
  drawDrains(v);
  drawBarriers(v);
  drawHealth(v);
  drawOutcomes(v);
  drawSpeed(v);
  drawAgents(v);
  tick();
  announce(v);
}

// owing lists what is still waited for at either gate: each word with its pod, the gate and whether it is late.
function owing(v) {
  const all = [];
  for (const [gate, items] of [['hold', v.drains.items], ['barrier', v.barriers.items]]) {
    for (const d of items) {
      if (d.phase === 'Queued' || d.phase === 'Released') continue;
      const half = (Date.parse(d.deadline) - Date.parse(d.since)) / 2;
      for (const w of d.reports) {
        if (w.state === 'idle' || w.suspended) continue;
        all.push({ gate, d, w, late: Date.parse(v.at) - Date.parse(d.since) > half || !w.connected });
      }
    }
  }
  return all;
}

// unseen reports whether a pod that waits is not listed, so that it is not known whether it is late.
function unseen(v) {
  return v.drains.open > v.drains.items.length || v.barriers.waiting > v.barriers.items.filter((b) => b.phase !== 'Released').length;
}

// say fills a line with texts, elements and what ticks, if it is another than before.
function say(id, sign, ...parts) {
  const line = $(id);
  if (line.dataset.sign === sign) return;
  line.dataset.sign = sign;
  line.replaceChildren(...parts);
}

const podOf = (agent) => { const [namespace, name] = agent.includes('/') ? agent.split('/') : ['', agent]; return { namespace, name }; };
const command = (text) => el('code', null, text);

// advice is what to do about a gateway that is late.
function advice({ w }) {
  const { namespace, name } = podOf(w.agent);
  if (!w.connected) return ['Is its pod running, and does it reach this coordinator? ', command('kubectl -n ' + namespace + ' describe pod ' + name), ' (runbook: LameduckAgentMissing)'];
  if (w.state === 'removed') return ['Nothing new is sent to the pod; requests still run on it. They are waited for a while and then cut: nothing has to be done, unless they should be shorter.'];
  if (w.state === 'kept') return ['The gateway has no other pod to send to: are other pods of its Service ready?'];
  return ['Its gateway goes on routing to the pod. The log of its agent: ', command('kubectl -n ' + namespace + ' logs ' + name + ' --all-containers'), ' (runbook: LameduckGatewayFails)'];
}

// entries are those of the runbook, for reasons that have one; docs/reasons.md has all.
const entries = { Deadline: 'LameduckDeadline', Suspended: 'LameduckAgentSuspended', AgentsLost: 'LameduckDeadline', Cold: 'LameduckBlind', NoFacts: 'LameduckBlind' };
const recent = 10 * 60 * 1000; // ms for which an end that was not right stays in the verdict

// drawVerdict says the one thing that people should know first: whether something is late, who, since when, and what to do.
function drawVerdict(v) {
  const late = owing(v).filter((o) => o.late).sort((a, b) => Date.parse(a.d.since) - Date.parse(b.d.since));
  const agents = v.agents.items.filter((a) => a.state === 'missing' || a.state === 'suspended');
  const open = v.targetHealth.services.filter((s) => s.failingOpen);
  const bad = v.outcomes.filter((o) => o.abnormal && Date.parse(v.at) - Date.parse(o.at) < recent);
  let kind, text, todo = [];
  if (v.replica.unasked) {
    kind = 'bad';
    text = ['Deletions do not wait: the API server does not ask, because there is no ValidatingWebhookConfiguration.'];
    todo = ['Apply the manifests again, or run ', command('helm upgrade'), ' (runbook: LameduckUnasked)'];
  } else if (late.length) {
    const o = late[0];
    kind = 'bad';
    text = [o.d.namespace + '/' + o.d.pod + ' has waited ', age(o.d.since), ' for ' + o.w.agent + (o.w.connected ? ', which ' + (verbs[o.w.state] || o.w.state) : ', which is not connected'),
      late.length > 1 ? '; ' + plural(late.length - 1, 'more report is', 'more reports are') + ' late' : '', '. ', until(o.d.deadline, 'It goes on without that in ', '.')];
    todo = advice(o);
  } else if (agents.length) {
    const a = agents[0], { namespace, name } = podOf(a.name);
    kind = 'bad';
    text = [a.name + (a.state === 'missing' ? ' is not connected' : ' is suspended: deletions no longer wait for it'), a.since && a.state === 'missing' ? [', for ', age(a.since)] : '',
      agents.length > 1 ? ', and ' + (agents.length - 1) + ' more' : '', a.state !== 'missing' ? '.' : a.ready ? '. Deletions of what it routes wait for it.' : '. Its pod is not ready: deletions do not wait for it, and its gateway may still send to pods that stop.'].flat();
    todo = ['Its pod: ', command('kubectl -n ' + namespace + ' describe pod ' + name), ' (runbook: ' + (a.state === 'missing' ? 'LameduckAgentMissing' : 'LameduckAgentSuspended') + ')'];
  } else if (open.length) {
    const s = open[0];
    kind = 'warn';
    text = [s.namespace + '/' + s.name + ' fails open at ' + s.failingOpen + ' of ' + plural(s.gateways, 'gateway', 'gateways') + ': too few of its targets are healthy, so that all get traffic.'];
    todo = ['Is the check right, or something broken on which all targets depend? Below is what the checks got (runbook: LameduckFailingOpen).'];
  } else if (bad.length) {
    kind = 'warn';
    text = [bad[0].namespace + '/' + bad[0].pod + ' went ', age(bad[0].at), ' ago without every acknowledgement: ' + bad[0].reason + (bad.length > 1 ? ', and ' + (bad.length - 1) + ' more' : '') + '.'];
    todo = [bad[0].silent.length ? 'Silent: ' + bad[0].silent.join(', ') + '. ' : '', 'Its requests may have been lost. See "How they ended" (' + (entries[bad[0].reason] ? 'runbook: ' + entries[bad[0].reason] : 'docs/reasons.md: ' + bad[0].reason) + ').'];
  } else if (v.silent.length) {
    kind = 'warn';
    text = ['What ' + v.silent.join(', ') + (v.silent.length > 1 ? ' know' : ' knows') + ' is missing here: ' + (v.silent.length > 1 ? 'these coordinators do' : 'this coordinator does') + ' not answer.'];
    todo = [command('kubectl lameduck status'), ' asks each one through the API server.'];
  } else if (v.barriers.missing) {
    kind = 'warn';
    text = [plural(v.barriers.missing, 'pod asks', 'pods ask') + ' for the barrier and ' + (v.barriers.missing > 1 ? 'were' : 'was') + ' created without it: ' + v.barriers.missingPods.slice(0, 3).join(', ') + (v.barriers.missing > 3 ? ' and more' : '') + '.'];
    todo = ['Restart what they belong to (runbook: LameduckBarrierMissing).'];
  } else if (v.drains.open || v.barriers.waiting) {
    kind = 'calm';
    const parts = [];
    if (v.drains.open) parts.push(plural(v.drains.open, 'pod is', 'pods are') + ' draining');
    if (v.barriers.waiting) parts.push(plural(v.barriers.waiting, 'pod waits', 'pods wait') + ' to stop');
    text = [parts.join(', ') + (unseen(v) ? '. None of those that are listed is late.' : ', no gateway is late.')];
  } else if (!v.agents.expected && !v.agents.items.some((a) => a.connected)) {
    kind = 'warn';
    text = ['No agent is ' + (v.agents.known ? 'left' : 'known') + ': deletions continue as without Lameduck.'];
    todo = ['An agent stands beside a gateway. Its pod has the label ', command('lameduck.io/agent'), '.'];
  } else {
    kind = 'good';
    text = ['Nothing is draining, and all is well' + (v.targetHealth.all.unhealthy ? ', but for ' + plural(v.targetHealth.all.unhealthy, 'target that is', 'targets that are') + ' unhealthy' : '') + ': ' + plural(v.agents.expected - v.agents.missing, 'gateway is', 'gateways are') + ' connected.'];
  }
  if ($('verdict').dataset.kind !== kind) $('verdict').dataset.kind = kind;
  const sign = (parts) => JSON.stringify(parts.map((p) => p.dataset ? p.dataset.since || p.dataset.until || p.textContent : p));
  say('verdict-text', sign(text), ...text);
  say('verdict-todo', sign(todo), ...todo);
  $('verdict-todo').hidden = todo.length === 0;
}

// drawLost withdraws what the page said before the connection was lost.
function drawLost() {
  $('verdict').dataset.kind = 'none';
  say('verdict-text', 'lost', 'Nothing is known since ', clock(view.at), '.');
  say('verdict-todo', 'lost', 'What stands below was so then.');
  $('verdict-todo').hidden = false;
}

// drawNamespaces lists the namespaces to choose from, and the pods for the form.
function drawNamespaces(v) {
  const pods = new Map();
  for (const i of [...v.drains.items, ...v.barriers.items, ...v.outcomes]) pods.set(i.namespace + '/' + i.pod, i);
  const all = new Set([...pods.values(), ...v.targetHealth.services].map((i) => i.namespace));
  if (namespace) all.add(namespace);
  const sign = JSON.stringify([[...all].sort(), namespace]);
  if ($('namespace').dataset.sign !== sign) {
    $('namespace').dataset.sign = sign;
    $('namespace').replaceChildren(el('option', { value: '' }, 'all'), ...[...all].sort().map((n) => el('option', { value: n, selected: n === namespace }, n)));
  }
  document.body.classList.toggle('one', namespace !== '');
  $('filter').hidden = all.size < 2 && !namespace;
  const known = JSON.stringify([...pods.keys()]);
  if ($('explain-pods').dataset.sign === known) return;
  $('explain-pods').dataset.sign = known;
  $('explain-pods').replaceChildren(...[...pods.values()].map((i) => el('option', { value: i.pod, label: i.namespace })));
}

// workload is the name of what made a pod, by the names that Kubernetes gives: a Deployment's pods end in the hash of their template and
// five characters, a StatefulSet's in a number, and others' in five characters.
function workload(pod) {
  const made = pod.match(/^(.+?)(?:-[bcdf-hj-np-tv-xz2456789]{6,10})?-[bcdf-hj-np-tv-xz2456789]{5}$/) || pod.match(/^(.+)-\d+$/);
  return made ? made[1] : pod;
}

// drawRollouts sums up pods of one workload that are deleted one after the other: most drains are over before anybody can read them.
function drawRollouts(v) {
  const all = new Map();
  const of = (i) => {
    const name = workload(i.pod), key = i.namespace + '/' + name;
    if (!all.has(key)) all.set(key, { namespace: i.namespace, name, pods: new Set(), open: new Set(), bad: new Set(), slowest: null, last: '' });
    const r = all.get(key);
    r.pods.add(i.uid);
    return r;
  };
  for (const d of [...v.drains.items, ...v.barriers.items]) {
    if (d.phase !== 'Released') of(d).open.add(d.uid);
  }
  for (const o of v.outcomes) {
    if (Date.parse(v.at) - Date.parse(o.at) > recent || o.reason === 'Abandoned') continue;
    const r = of(o);
    if (o.abnormal) r.bad.add(o.uid);
    if (o.at > r.last) r.last = o.at;
    if (o.tookSeconds !== undefined && (!r.slowest || o.tookSeconds > r.slowest.tookSeconds)) r.slowest = o;
  }
  const cut = v.outcomes.length >= 100 || v.drains.open > v.drains.items.length || v.barriers.open > v.barriers.items.length;
  const items = chosen([...all.values()]).filter((r) => r.pods.size > 1)
    .map((r) => ({ ...r, pods: r.pods.size, open: r.open.size, bad: r.bad.size })).sort((a, b) => b.open - a.open || (a.last < b.last ? 1 : -1));
  rows($('rollouts-table'), items, (r) => r.namespace + '/' + r.name, (r) => [
    head(el('span', { class: 'ns' }, r.namespace + '/'), r.name),
    cell('Pods gone', 'number', (cut ? 'at least ' : '') + (r.pods - r.open) + ' of ' + r.pods),
    cell('Not acknowledged', 'number', r.bad ? chip('bad', r.bad) : '0'),
    cell('Slowest', '', r.slowest ? el('span', null, duration(r.slowest.tookSeconds), el('span', { class: 'sub' }, r.slowest.pod.slice(r.name.length + 1) + ', at the ' + r.slowest.gate)) : ''),
    cell('Last', 'when', r.last ? clock(r.last) : ''),
  ]);
  $('rollouts').hidden = items.length === 0;
}

function drawTiles(v) {
  set('tile-drains', v.drains.open);
  set('tile-drains-note', v.drains.elsewhere ? 'and ' + v.drains.elsewhere + ' through other replicas' : v.replica.holds ? plural(v.replica.holds, 'call held', 'calls held') : '');
  $('tile-drains').closest('.tile').classList.toggle('notice', v.drains.open > 0);
  const waits = v.barriers.waiting;
  set('tile-barriers', waits);
  set('tile-barriers-note', v.barriers.open > waits ? v.barriers.open - waits + ' may stop' : '');
  $('tile-barriers').closest('.tile').classList.toggle('notice', waits > 0);
  const owed = owing(v);
  const late = owed.filter((o) => o.late);
  set('tile-late', new Set(owed.map((o) => o.w.agent)).size);
  const oldest = owed.map((o) => o.d).sort((a, b) => Date.parse(a.since) - Date.parse(b.since))[0];
  const note = $('tile-late-note');
  if (oldest) {
    if (!note.firstChild || note.firstChild.dataset?.since !== oldest.since) note.replaceChildren(age(oldest.since, ' at most'));
  } else note.replaceChildren();
  $('tile-late-box').classList.toggle('trouble', late.length > 0);
  set('tile-agents', v.agents.expected - v.agents.missing + ' of ' + v.agents.expected);
  const trouble = [];
  if (v.agents.missing) trouble.push(v.agents.missing + ' missing');
  if (v.agents.suspended) trouble.push(v.agents.suspended + ' suspended');
  set('tile-agents-note', trouble.join(', '));
  $('tile-agents-box').classList.toggle('trouble', trouble.length > 0);
  const health = v.targetHealth, open = health.services.filter((s) => s.failingOpen).length;
  set('tile-health', health.reported ? health.all.unhealthy : '–');
  set('tile-health-note', open ? plural(open, 'Service fails', 'Services fail') + ' open' : health.reported ? 'seen by ' + plural(health.agents, 'gateway', 'gateways') : 'not reported');
  $('tile-health-box').classList.toggle('trouble', health.all.unhealthy > 0 || open > 0);
  const bad = v.outcomes.filter((o) => o.abnormal).length;
  set('tile-bad', bad);
  set('tile-bad-note', v.outcomes.length ? 'of the last ' + v.outcomes.length : '');
  $('tile-bad-box').classList.toggle('trouble', bad > 0);
}

const phases = {
  Queued: ['', 'waits for capacity: at most half of a Service at a time'],
  Unrouting: ['calm', 'gateways take it out'],
  Quiescing: ['calm', 'nothing new is sent to it; running requests end'],
  Released: ['good', 'it may go'],
};

const states = { unknown: 'silent', routing: 'still routes', kept: 'keeps it as the last one', removed: 'removed, requests still run', idle: 'idle' };
const verbs = { unknown: 'is silent', routing: 'still routes to it', kept: 'keeps it as the last one', removed: 'still runs requests on it' };

// reportList lists the agents that have not reported Idle, and how many have.
function reportList(d) {
  const waits = d.reports.filter((w) => w.state !== 'idle');
  const list = el('ul', { class: 'reports' }, ...waits.slice(0, 4).map((w) => el('li', null,
    w.agent, ' ', el('span', { class: 'sub' }, (w.suspended ? 'suspended, ' : '') + (w.connected ? states[w.state] || w.state : 'not connected'), w.since ? ', for ' : '', w.since ? age(w.since) : ''))));
  const more = Math.max(d.waiting, waits.length) - Math.min(waits.length, 4);
  if (more > 0) list.append(el('li', { class: 'sub' }, 'and ' + more + ' more'));
  if (d.owed > 1) list.append(el('li', null, el('span', { class: 'sub' }, d.owed - d.waiting + ' of ' + d.owed + ' have acknowledged')));
  return list;
}

function time(d) {
  if (d.phase === 'Released') return age(d.since);
  return el('span', null, age(d.since), el('span', { class: 'sub' }, until(d.deadline, 'goes on in any case in ')), el('progress', { max: Date.parse(d.deadline) - Date.parse(d.since), value: 0, 'data-from': d.since, 'aria-label': d.pod + ': of the time until its deadline' }));
}

function drawDrains(v) {
  const items = chosen(v.drains.items);
  rows($('drains-table'), items, (d) => d.uid, (d) => {
    const [kind, says] = phases[d.phase] || ['', ''];
    let list;
    if (d.phase === 'Released') list = d.reason;
    else if (d.phase === 'Queued') list = el('span', { class: 'sub' }, 'capacity in its Service');
    else list = reportList(d);
    return [
      head(...podName(d)),
      cell('Phase', '', el('span', null, chip(kind, d.phase, says), el('span', { class: 'sub' }, says))),
      cell('For', '', time(d)),
      cell('Waits for', '', list),
    ];
  });
  $('drains-empty').hidden = items.length > 0;
  const notes = [];
  if (v.drains.open > v.drains.items.length) notes.push('The oldest ' + v.drains.items.length + ' of ' + v.drains.open + ', those that wait before those that may go.');
  if (v.drains.elsewhere) notes.push(plural(v.drains.elsewhere, 'pod is', 'pods are') + ' drained through replicas that have not answered: kubectl lameduck drains asks them, too.');
  set('drains-note', notes.join(' '));
  $('drains-note').hidden = notes.length === 0;
}

const barrierPhases = {
  Unrouting: ['calm', 'it is terminating; gateways stop routing to it by themselves'],
  Quiescing: ['calm', 'nothing new is sent to it; connections end'],
  Released: ['good', 'its hooks were answered, but for stated waits'],
};

function drawBarriers(v) {
  const items = chosen(v.barriers.items);
  rows($('barriers-table'), items, (b) => b.uid, (b) => {
    const [kind, says] = barrierPhases[b.phase] || ['', ''];
    const list = b.phase === 'Released' ? el('ul', { class: 'reports' }, el('li', null, b.reason)) : reportList(b);
    const also = [];
    if (b.statedUntil && new Date(b.statedUntil) > Date.now()) also.push('a stated wait of ' + duration(b.statedSeconds) + (b.cut ? ', which its bound cuts' : ''));
    if (b.last) also.push('no other endpoint is ready: gateways may keep it, and it only has to be quiet');
    if (b.sampled) also.push('a sample of nodes is asked');
    also.push((b.hook ? 'hook ' + b.hook.replace(',', ' and ') : 'hook') + ', asked by ' + b.askedBy);
    if (b.uncovered.length) also.push('not covered: ' + b.uncovered.join(', '));
    for (const text of also) list.append(el('li', { class: 'sub' }, text));
    return [
      head(...podName(b), b.node ? el('span', { class: 'sub' }, 'on ' + b.node) : ''),
      cell('Phase', '', el('span', null, chip(kind, b.phase, says), el('span', { class: 'sub' }, says))),
      cell('For', '', time(b)),
      cell('Waits for', '', list),
    ];
  });
  $('barriers-empty').hidden = items.length > 0;
  const note = v.barriers.open > v.barriers.items.length ? 'The oldest ' + v.barriers.items.length + ' of ' + v.barriers.open + ', those that wait before those that may stop.' : '';
  set('barriers-note', note);
  $('barriers-note').hidden = !note;
}

function targetCounts(c) {
  const parts = [];
  for (const [n, text] of [[c.usable, 'healthy'], [c.unhealthy, 'unhealthy'], [c.unknown, 'not judged'], [c.excluded, 'excluded'], [c.doubtful, 'in doubt']]) if (n) parts.push(n + ' ' + text);
  return parts.join(', ') || 'none';
}

const targetWhys = { unhealthy: 'gets no traffic', 'failing-open': 'gets traffic all the same', 'held-back': 'gets traffic until another is routed', pending: 'is to get traffic all the same' };

function drawHealth(v) {
  const h = v.targetHealth;
  const services = chosen(h.services);
  const items = allHealth ? services : services.filter((s, i) => i < shown || s.trouble);
  rows($('health-table'), items, (s) => s.namespace + '/' + s.name, (s) => {
    const checked = s.says.some((g) => g.checked);
    let state = chip(checked ? 'good' : '', checked ? 'well' : 'not checked', checked ? '' : 'its Service has no check, or none has ended yet');
    if (s.failingOpen) state = chip('bad', 'fails open');
    else if (s.unwell) state = chip('warn', 'unhealthy targets');
    else if (s.trouble) state = chip('warn', 'in doubt');
    const counts = new Set(s.says.map(targetCounts));
    const alike = counts.size === 1;
    const list = el('ul', { class: 'reports' });
    if (alike && !s.trouble) list.append(el('li', { class: 'sub' }, s.gateways === 1 ? s.says[0].agent : 'all ' + s.gateways + ' gateways'));
    else {
      for (const g of s.says.slice(0, 4)) {
        list.append(el('li', null, g.agent, ' ', el('span', { class: 'sub' }, (g.failingOpen ? 'fails open: ' : '') + targetCounts(g)),
          g.targets.length ? el('ul', { class: 'targets' }, ...g.targets.slice(0, 3).map((t) => el('li', { class: 'sub' },
            t.pod || t.address, t.pod ? ' (' + t.address + ')' : '', ' ' + (targetWhys[t.why] || t.why), t.last ? ': ' + t.last : '', t.since ? ', for ' : '', t.since ? age(t.since) : ''))) : ''));
      }
      if (s.gateways > 4) list.append(el('li', { class: 'sub' }, 'and ' + (s.gateways - 4) + ' more gateways'));
    }
    return [
      head(el('span', { class: 'ns' }, s.namespace + '/'), s.name),
      cell('State', '', el('span', null, state, s.failingOpen || s.unwell ? el('span', { class: 'sub' }, 'at ' + (s.failingOpen || s.unwell) + ' of ' + plural(s.gateways, 'gateway', 'gateways')) : '')),
      cell('Targets', '', alike ? targetCounts(s.says[0]) : 'gateways differ'),
      cell('Reports', '', list),
    ];
  });
  $('health-empty').hidden = services.length > 0;
  const more = $('health-more');
  more.hidden = !allHealth && items.length === services.length || services.length <= shown;
  more.setAttribute('aria-expanded', allHealth);
  set('health-more', allHealth ? 'Show fewer' : 'Show all ' + services.length);
  const notes = [];
  if (h.known > h.services.length) notes.push('The first ' + h.services.length + ' of ' + h.known + ' Services, those with trouble before the others.');
  if (h.untold) notes.push('Of ' + h.untold + ' more there was no room to tell.');
  notes.push(h.where);
  set('health-note', notes.join(' '));
}

const reasons = {
  Acknowledged: ['good', 'every gateway has acknowledged'],
  BarrierWaits: ['good', 'gateways had stopped sending to it; its barrier waited for requests in flight'],
  IdleBound: ['warn', 'requests still ran on it when the bound had passed'],
  Deadline: ['bad', 'not every gateway has acknowledged'],
  Suspended: ['bad', 'a gateway that is not waited for any more may still route to it'],
  AgentsLost: ['bad', 'a gateway that was lost meanwhile may still route to it'],
  Uncovered: ['bad', 'something that routes it was not waited for'],
  NoAgents: ['', 'no gateway had to acknowledge'],
  NotEnforced: ['', 'its mode is observe or off'],
  LastTarget: ['warn', 'no other pod of its Service was ready'],
  NoFacts: ['bad', 'the replica could not find out'],
  PodDeleted: ['', 'it went without waiting, gateways were told'],
  Abandoned: ['calm', 'it lives on, and has its traffic back'],
};

function drawOutcomes(v) {
  const all = chosen(v.outcomes);
  const items = allOutcomes ? all : all.slice(0, shown);
  rows($('outcomes-table'), items, (o) => o.uid + o.gate + o.at, (o) => {
    const [kind, says] = reasons[o.reason] || [o.abnormal ? 'warn' : '', ''];
    let why = o.message || says;
    if (!o.message && o.silent.length) why += (o.abnormal ? ': ' : '; not waited for: ') + o.silent.join(', ') + (o.moreSilent ? ' and ' + o.moreSilent + ' more' : '');
    return [
      cell('When', 'when', clock(o.at)),
      el('th', { role: 'rowheader', scope: 'row' }, ...podName(o)),
      cell('Why', 'why', el('span', null, chip(kind, o.reason), el('span', { class: 'sub' }, (o.gate === 'barrier' ? 'SIGTERM, at the barrier: ' : '') + why))),
      cell('Waited', 'number', o.tookSeconds === undefined ? '' : duration(o.tookSeconds)),
    ];
  });
  $('outcomes-empty').hidden = all.length > 0;
  const more = $('outcomes-more');
  more.hidden = all.length <= shown;
  more.setAttribute('aria-expanded', allOutcomes);
  set('outcomes-more', allOutcomes ? 'Show fewer' : 'Show all ' + all.length);
}

function drawSpeed(v) {
  rows($('speed-table'), v.propagation, (p) => p.gateway + p.what, (p) => [
    head(p.gateway), cell('What', '', p.what),
    ...[['Median', p.p50Seconds], ['90 %', p.p90Seconds], ['99 %', p.p99Seconds], ['Slowest', p.maxSeconds]].map(([label, s]) => cell(label, 'number', duration(s))),
    cell('Of', 'number', p.samples + (p.count > p.samples ? ' (of ' + p.count + ')' : '')),
  ]);
  $('speed-empty').hidden = v.propagation.length > 0;
  plot(v.propagation);
}

// plot draws a bar for each kind of gateway and what, on one logarithmic axis. The table beneath says the same in numbers.
let plotted = '';
function plot(all) {
  const width = Math.floor($('plot').clientWidth);
  const sign = JSON.stringify([all, width]);
  if (sign === plotted || width < 50) return;
  plotted = sign;
  $('plot').replaceChildren();
  if (!all.length) return;
  const values = all.flatMap((p) => [p.p50Seconds, p.maxSeconds]).map((s) => Math.max(s, 0.0005));
  const from = Math.floor(Math.log10(Math.min(...values))), to = Math.max(from + 1, Math.ceil(Math.log10(Math.max(...values)) - 0.001));
  const row = 30, top = 6, axis = top + all.length * row, left = Math.min(150, Math.max(126, width * 0.34)), right = width - 34;
  const x = (s) => left + (Math.log10(Math.max(s, 10 ** from)) - from) / (to - from) * (right - left);
  const picture = svg('svg', { viewBox: `0 0 ${width} ${axis + 24}`, width, height: axis + 24, role: 'img', 'aria-label': 'Times until gateways stop routing, on a logarithmic axis; the table has the numbers' });
  for (let power = from; power <= to; power++) {
    const at = x(10 ** power);
    picture.append(svg('line', { class: 'grid', x1: at, x2: at, y1: top, y2: axis }));
    picture.append(svg('text', { x: at, y: axis + 17, 'text-anchor': 'middle' }, power < 0 ? 1000 * 10 ** power + ' ms' : 10 ** power + ' s'));
  }
  all.forEach((p, i) => {
    const y = top + i * row + row / 2;
    picture.append(svg('text', { class: 'label', x: 0, y: y + 4 }, p.gateway + ' ' + p.what));
    const p50 = x(p.p50Seconds), p99 = x(p.p99Seconds), max = x(p.maxSeconds);
    picture.append(svg('rect', { class: 'bar ' + p.what, x: p50, y: y - 7, width: Math.max(2, p99 - p50), height: 14, rx: 3 }));
    picture.append(svg('line', { class: p.what, x1: p99, x2: max, y1: y, y2: y, 'stroke-width': 1.5 }));
    picture.append(svg('line', { class: p.what, x1: max, x2: max, y1: y - 6, y2: y + 6, 'stroke-width': 2 }));
    picture.append(svg('circle', { class: p.what, cx: p50, cy: y, r: 5 }));
  });
  $('plot').append(picture);
}

const agentStates = {
  connected: ['good', 'connected'], missing: ['bad', 'missing'], starting: ['', 'starting'], suspended: ['bad', 'suspended'], left: ['', 'has left'], gone: ['', 'gone'],
};

function drawAgents(v) {
  rows($('agents-table'), v.agents.items, (a) => a.id, (a) => {
    const [kind, text] = agentStates[a.state] || ['', a.state];
    const last = a.idleSeconds || a.removedSeconds;
    return [
      head(...podName({ namespace: podOf(a.name).namespace, pod: podOf(a.name).name }), a.declared ? '' : el('span', { class: 'sub' }, 'has not said what it routes: owes everything')),
      cell('Gateway', '', a.gateway ? el('span', null, a.gateway, a.gatewayMode ? el('span', { class: 'sub' }, a.gatewayMode) : '') : ''),
      cell('Node', '', a.node || ''),
      cell('State', '', el('span', null, chip(kind, text, a.features.length ? 'protocol ' + a.protocol + ', ' + a.features.join(', ') : ''), a.since ? el('span', { class: 'sub' }, 'for ', age(a.since)) : '')),
      cell('Services', 'number', a.everyService ? 'all' : a.declared ? String(a.services) : ''),
      cell('Last drain', 'number', last ? duration(last) : ''),
      cell('Last report', '', a.reported ? el('span', null, age(a.reported, ' ago'), el('span', { class: 'sub' }, duration(a.reportAgeSeconds || 0) + ' old when it came')) : ''),
    ];
  });
  $('agents-empty').hidden = v.agents.items.length > 0;
  const cutNote = v.agents.known > v.agents.items.length ? 'The first ' + v.agents.items.length + ' of ' + v.agents.known + ', those with trouble before the others.' : '';
  set('agents-note', cutNote);
  $('agents-note').hidden = !cutNote;
}

// tick brings what grows with time up to date.
function tick() {
  const now = Date.now() + skew;
  const connection = $('connection');
  const state = live ? 'live' : view ? 'lost' : 'connecting';
  if (connection.dataset.state !== state) connection.dataset.state = state;
  set('connection-text', live ? 'Live' : view ? 'Connection lost, last seen ' + whole((Date.now() - seen) / 1000) + ' ago' : ($('token-form').hidden ? 'Connecting' : 'Not signed in') + fault);
  if (!live) return; // what is old does not age
  cover();
  for (const e of document.querySelectorAll('.age')) {
    const seconds = (now - Date.parse(e.dataset.since || e.dataset.until)) / 1000;
    const text = e.dataset.until ? e.dataset.before + whole(-seconds) + e.dataset.after : whole(seconds) + e.dataset.after;
    if (e.textContent !== text) e.textContent = text;
  }
  for (const e of document.querySelectorAll('progress[data-from]')) {
    const passed = now - Date.parse(e.dataset.from);
    e.value = Math.max(0, Math.min(passed, e.max));
    e.classList.toggle('late', passed > e.max / 2);
  }
}

// announce tells those who listen when the number of drains has changed or something went wrong, and not more often than every 5 s.
let told = { drains: 0, barriers: 0, bad: null, open: '', late: '', away: 0, at: 0 }, later = null;
function announce(v) {
  const bad = v.outcomes.filter((o) => o.abnormal);
  const newest = bad.length ? bad[0].uid + bad[0].at : '';
  if (told.bad === null) told.bad = newest;
  const waits = v.barriers.waiting;
  const open = v.targetHealth.services.filter((s) => s.failingOpen).map((s) => s.namespace + '/' + s.name).join(', ');
  const late = owing(v).find((o) => o.late)?.w.agent ?? '', away = v.agents.missing + v.agents.suspended;
  if (v.drains.open === told.drains && waits === told.barriers && newest === told.bad && open === told.open && late === told.late && away === told.away) return;
  const rest = told.at + 5000 - Date.now();
  if (rest > 0) {
    if (!later) later = setTimeout(() => { later = null; if (view) announce(view); }, rest); // there is none where a token has expired meanwhile
    return;
  }
  let text = v.drains.open ? plural(v.drains.open, 'pod is', 'pods are') + ' draining.' : told.drains ? 'Nothing is draining any more.' : '';
  if (waits !== told.barriers) text += waits ? ' ' + plural(waits, 'pod waits', 'pods wait') + ' to stop.' : ' No pod waits to stop any more.';
  if (open !== told.open) text += open ? ' ' + open + ' fails open.' : ' No Service fails open any more.';
  if (newest && newest !== told.bad) text += ' ' + bad[0].pod + ' was deleted without every acknowledgement: ' + bad[0].reason + '.';
  if (late !== told.late) text += late ? ' ' + late + ' is late.' : ' No gateway is late any more.';
  if (away !== told.away) text += away ? ' ' + plural(away, 'agent is', 'agents are') + ' not connected, or suspended.' : ' All agents are connected.';
  told = { drains: v.drains.open, barriers: waits, bad: newest, open, late, away, at: Date.now() };
  set('announce', text.trim());
}

// --- coverage

let covered = 0; // our clock, when it was asked last
async function cover() {
  if (!live || Date.now() - covered < 15000) return;
  covered = Date.now();
  showObserved();
  try {
    const response = await fetch('v1/coverage', { headers: authorization(), signal: AbortSignal.timeout(silence), cache: 'no-store' });
    if (!response.ok) throw new Error(await failure(response));
    const c = await response.json();
    set('coverage-note', c.uncovered ? 'Deletions of these Services\' pods go on although something that routes them was not waited for. What to do: docs/coverage.md.'
      : 'Everything that is known to route the ' + plural(c.services, 'Service', 'Services') + ' with pods is waited for, or may not route them at all.');
    if (c.uncovered > c.items.length) $('coverage-note').append(' The first ' + c.items.length + ' of ' + c.uncovered + '.');
    if (c.error) $('coverage-note').append(' Not all could be read: ' + c.error);
    rows($('coverage-table'), namespace ? c.items.filter((i) => i.service.startsWith(namespace + '/')) : c.items, (i) => [i.service, i.name, i.why].join('\n'), (i) => [head(i.service), cell('Routed by', '', i.name), cell('Why it is not waited for', '', i.why)]);
    $('coverage').hidden = false;
  } catch (e) {
    // It is asked again.
    set('coverage-note', 'What routes Services could not be read again: ' + e.message);
  }
}

// showObserved says what deletions in mode observe would have waited for.
async function showObserved() {
  try {
    const response = await fetch('v1/report?replicas=all', { headers: authorization(), cache: 'no-store' });
    if (!response.ok) return; // a replica of the version before
    const items = chosen((await response.json()).namespaces);
    rows($('observed-table'), items, (i) => i.namespace, (i) => {
      const waits = [...i.waitSeconds].sort((a, b) => a - b);
      return [
        head(i.namespace),
        cell('Deletions', 'number', String(i.deletions)),
        cell('Median wait', 'number', waits.length ? duration(waits[(waits.length - 1) >> 1]) : ''),
        cell('Longest wait', 'number', waits.length ? duration(waits[waits.length - 1]) : ''),
        cell('In flight', 'number', String(i.inFlight)),
        cell('Not measured', 'number', String(i.unmeasured)),
      ];
    });
    $('observed').hidden = items.length === 0;
  } catch (e) {
    // it is asked again
  }
}

// --- what if

let questions = 0; // only the answer to the last one is shown
$('explain-form').addEventListener('submit', async (e) => {
  e.preventDefault();
  const result = $('explain-result');
  const pod = ['explain-namespace', 'explain-pod'].map((id) => $(id).value.trim());
  const path = pod.map(encodeURIComponent).join('/'), question = ++questions;
  let parts;
  result.replaceChildren();
  try {
    const response = await fetch('v1/explain/' + path + '?replicas=all&operation=' + $('explain-operation').value, { headers: authorization(), signal: AbortSignal.timeout(silence), cache: 'no-store' });
    if (!response.ok) throw new Error(await failure(response));
    parts = explained(await response.json());
  } catch (error) {
    parts = [el('p', { class: 'error' }, pod.join('/') + ': ' + error.message)];
  }
  if (question === questions) result.replaceChildren(...parts);
});

// explain asks about a pod that is named on the page.
document.addEventListener('click', (e) => {
  const link = e.target.closest('[data-explain]');
  if (!link) return;
  e.preventDefault();
  [$('explain-namespace').value, $('explain-pod').value] = link.dataset.explain.split('/');
  $('explain-form').requestSubmit();
  $('explain').scrollIntoView();
  $('explain-result').focus({ preventScroll: true });
});

$('explain-pod').addEventListener('change', () => {
  const known = [...$('explain-pods').options].filter((o) => o.value === $('explain-pod').value);
  if (known.length === 1) $('explain-namespace').value = known[0].label;
});

$('namespace').addEventListener('change', () => {
  namespace = $('namespace').value;
  history.replaceState(null, '', namespace ? '#namespace=' + namespace : location.pathname + location.search);
  covered = 0;
  if (view) draw();
  if (view && !live) drawLost();
});

function explained(x) {
  const kind = { drain: 'calm', allow: '', deny: 'warn' }[x.answer] || '';
  const parts = [el('p', { class: 'answer' }, el('strong', null, x.namespace + '/' + x.pod), ' ', chip(kind, x.reason), ' ', x.summary)];
  for (const text of x.differs || []) parts.push(el('p', { class: 'note' }, 'Another answer: ' + text));
  if (x.silent) parts.push(el('p', { class: 'note' }, 'Not explained by ' + x.silent.join(' and ') + '.'));
  const list = (title, items) => {
    if (items.length) parts.push(el('h3', null, title), el('ul', null, ...items.map((i) => el('li', null, ...i))));
  };
  const most = 12; // of gateways: a barrier may ask hundreds of nodes
  const gates = x.gates.slice(0, most).map((g) => [el('strong', null, g.agent), g.gateway ? ' (' + g.gateway + (g.node ? ' on ' + g.node : '') + ')' : '', ', at the ' + g.gate, el('span', { class: 'sub' }, g.why)]);
  if (x.gates.length > most) gates.push(['and ' + (x.gates.length - most) + ' more']);
  list('Would have to acknowledge', gates);
  const b = x.barrier;
  if (b) {
    const facts = [['Hooks: ' + (b.hooks.map((h) => h.container + ' ' + h.kind).join(', ') || 'none')]];
    if (b.boundSeconds) facts.push(['They last ' + duration(b.boundSeconds) + ' at most' + (b.graceSeconds ? '; the application then has ' + duration(b.graceSeconds) : '')]);
    if (b.node) facts.push([b.agent ? 'On ' + b.node + ' ' + b.agent + ' answers them' + (b.connected ? ', and is connected' : ', and is not connected') : 'On ' + b.node + ' no agent answers them']);
    for (const s of b.stated) facts.push([s.namespace + '/' + s.service + (s.error ? ' states a wait that cannot be read: ' + s.error : ' states a wait of ' + (s.atMost ? 'at most ' : '') + duration(s.seconds) + (s.cut ? ', which the bound cuts' : ''))]);
    if (b.open) facts.push(['It waits there now: ' + b.open.phase]);
    list('At the barrier, before SIGTERM', facts);
  }
  list('Routed by', (x.consumers || []).map((c) => [el('strong', null, c.name), ', ' + c.service + ': ' + c.state, el('span', { class: 'sub' }, c.why || '')]));
  list('Not covered', x.uncovered.map((u) => [el('strong', null, u.what), el('span', { class: 'sub' }, u.why)]));
  list('Services that list it', x.services.map((s) => [s.namespace + '/' + s.name, ', ' + plural(s.usable, 'usable target', 'usable targets')]));
  return parts;
}

$('health-more').addEventListener('click', () => {
  allHealth = !allHealth;
  if (view) drawHealth(view);
});

$('outcomes-more').addEventListener('click', () => {
  allOutcomes = !allOutcomes;
  if (view) drawOutcomes(view);
});

new ResizeObserver(() => { if (view) plot(view.propagation); }).observe($('plot'));
setInterval(tick, 500);
window.addEventListener('online', () => waiting && waiting());
follow();
