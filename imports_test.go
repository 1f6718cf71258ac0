package lameduck_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/lameduck-io/lameduck/"

// rules say what packages must never import, directly or not, and why. A pattern is a path, or the
// beginning of one and "...".
var rules = []struct{ of, never, why string }{
	{"pkg/drain", "net/http", "the ledger is run by a simulation, ten thousand failures a second: no HTTP"},
	{"pkg/drain", "k8s.io/...", "the ledger is run by a simulation: no Kubernetes"},
	{"pkg/drain", "sigs.k8s.io/...", "the ledger is run by a simulation: no Kubernetes"},
	{"pkg/target", module + "...", "it is the vocabulary of all others"},
	{"pkg/drain", module + "internal/...", "the ledger rests on pkg/target alone"},
	{"pkg/drain", module + "pkg/health...", "the ledger rests on pkg/target alone"},
	{"pkg/drain", module + "pkg/gateway...", "the ledger rests on pkg/target alone"},
	{"pkg/drain/wire", "k8s.io/...", "the wire is between our own programs"},
	{"internal/agent/client", "k8s.io/...", "the client is the agent's side of the wire, and no more"},
	{"internal/agent/journal", "k8s.io/...", "the journal keeps promises when everybody else is away"},
	{"internal/agent/journal", "net/http", "the journal keeps promises when everybody else is away"},
	{"internal/coordinator", "k8s.io/...", "the coordinator is told about pods, it does not watch them"},
	{"pkg/health", module + "internal/...", "what an agent knows rests on pkg/target alone"},
	{"pkg/health", module + "pkg/drain...", "what an agent knows rests on pkg/target alone"},
	{"internal/keys", module + "...", "lameduck-wait imports it"},
	{"pkg/health", "k8s.io/...", "targets are addresses and UIDs; endpoints translates"},
	{"pkg/health", "net/http", "the set has no I/O"},
	{"internal/agent/serving", module + "...", "whether the gateway follows in time depends on nothing else"},
	{"internal/agent/serving", "k8s.io/...", "whether the gateway follows in time must never depend on the API server"},
	{"internal/endpoints", module + "pkg/drain...", "endpoints knows targets, not drains"},
	{"internal/endpoints", module + "pkg/gateway...", "endpoints knows targets, not gateways"},
	{"pkg/gateway", "k8s.io/...", "gateways are told what to route"},
	{"pkg/gateway", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/gateway/haproxy", "k8s.io/...", "gateways are told what to route"},
	{"pkg/gateway/haproxy", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/gateway/kubeproxy", "k8s.io/...", "what the kernel does is asked of the kernel"},
	{"pkg/gateway/poll", "k8s.io/...", "what a gateway does is asked of the gateway"},
	{"pkg/gateway/poll", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/gateway/sockets", module + "...", "kinds of gateways import it"},
	{"pkg/gateway/envoy", "k8s.io/...", "what Envoy does is asked of Envoy"},
	{"pkg/gateway/kernel", "k8s.io/...", "what the kernel does is asked of the kernel"},
	{"pkg/gateway/kernel", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/gateway/apisix", "k8s.io/...", "gateways are told what to route"},
	{"pkg/gateway/apisix", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/gateway/traefik", "k8s.io/...", "what Traefik does is asked of Traefik"},
	{"pkg/gateway/kubeproxy", module + "pkg/drain...", "gateways know nothing of who asks"},
	{"pkg/admission", module + "pkg/gateway...", "the webhook never talks to a gateway"},
	{"internal/dashboard", module + "pkg/gateway...", "the page shows what coordinators know"},
	{"internal/dashboard/api", module + "...",
		"what readers are told is words and numbers: kubectl lameduck needs no more of us"},
	{"internal/dashboard/api", "k8s.io/...", "what readers are told is words and numbers"},
	{"internal/coordinator", module + "internal/dashboard", "the coordinator does not know who looks"},
	{"pkg/admission", module + "internal/dashboard", "nothing is decided by what is shown"},
	{"cmd/kubectl-lameduck", "sigs.k8s.io/controller-runtime/...", "people install it on their own machines: small"},
	{"cmd/kubectl-lameduck", module + "pkg/drain...", "it knows coordinators by what they tell, also newer ones"},
	{"internal/certs", module + "pkg/...", "certificates know nothing of drains"},
	{"internal/certs", "sigs.k8s.io/controller-runtime/...", "three objects are read and written: client-go is enough"},
	{"internal/config", "k8s.io/...", "configuration is read before anything of Kubernetes is there"},
	{"cmd/agent", "sigs.k8s.io/controller-runtime/...", "the agent stands beside every proxy and has to stay small"},
	{"cmd/agent", module + "pkg/admission...", "the agent answers no reviews"},
	{"cmd/agent", module + "internal/coordinator...", "the agent keeps no ledger"},
	{"internal/cli", "k8s.io/...", "it is of every command"},
	{"internal/watch", module + "...", "it knows objects of the API server, not what they are for"},
	{"internal/agent/hooks", module + "pkg/gateway/...", "hooks wait for any gateway that can be observed"},
	{"internal/agent/observation", module + "pkg/gateway/...", "any gateway can be observed"},
	{"internal/agent/exclusion", module + "pkg/gateway/...", "exclusions are of any gateway that can be directed"},
	{"internal/agent/source", module + "pkg/drain...", "endpoints are what EndpointSlices say"},
	{"cmd/lameduck-wait", module + "pkg/...", "it runs in other people's containers and takes their memory"},
	{"internal/version", "net/http", "every program says which version it is, lameduck-wait too"},
	{"internal/version", "k8s.io/...", "every program says which version it is, lameduck-wait too"},
	{"cmd/lameduck-wait", "k8s.io/...", "it runs in other people's containers and takes their memory"},
	{"cmd/lameduck-wait", "net/http", "it runs in other people's containers and takes their memory"},
	{"cmd/lameduck-wait", "crypto/tls", "it runs in other people's containers and takes their memory"},
}

func TestImportsPointOneWay(t *testing.T) {
	deps := dependencies(t)
	for _, r := range rules {
		of := module + r.of
		imports, ok := deps[of]
		if !ok {
			t.Errorf("there is no package %s: mend the rule", of)
			continue
		}
		for _, path := range imports {
			prefix, many := strings.CutSuffix(r.never, "...")
			if path != of && (path == r.never || many && strings.HasPrefix(path, prefix)) {
				t.Errorf("%s imports %s: %s", r.of, path, r.why)
			}
		}
	}
}

// dependencies maps each package of the module to all that it imports, directly or not.
func dependencies(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Deps", "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	deps := map[string][]string{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Deps       []string
		}
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return deps
		}
		if err != nil {
			t.Fatalf("go list: %v", err)
		}
		deps[p.ImportPath] = p.Deps
	}
}
