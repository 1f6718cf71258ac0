package main

import (
	"bytes"
	"errors"
	"flag"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/internal/config"
)

// certificates makes a directory with files of the right names. Nothing here reads them.
func certificates(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"tls.crt", "tls.key"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// good is a configuration whose files are there.
func good(t *testing.T) map[string]any {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"apiVersion": config.APIVersion, "kind": kind,
		"certificates": map[string]any{"dir": certificates(t), "admissionSecretFile": secret}}
}

// with adds what text says to a configuration, and returns the arguments that make it the one.
func with(t *testing.T, all map[string]any, text string) []string {
	t.Helper()
	var sections map[string]any
	err := yaml.Unmarshal([]byte(text), &sections)
	for name, value := range sections {
		section, ok := all[name].(map[string]any)
		keys, more := value.(map[string]any)
		if ok && more {
			maps.Copy(section, keys)
		} else {
			all[name] = value
		}
	}
	content, again := yaml.Marshal(all)
	if err := errors.Join(err, again); err != nil {
		t.Fatal(err)
	}
	return file(t, string(content))
}

func env(name string) string {
	return map[string]string{"POD_NAME": "webhook-0", "POD_NAMESPACE": "lameduck"}[name]
}

func TestDefaults(t *testing.T) {
	o, err := parse(with(t, good(t), ""), env, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.namespace != "lameduck" || o.replica != "webhook-0" || o.Holds.Most != 64 || o.Holds.PerOwner != 8 ||
		o.times.Hold != 2*time.Second ||
		!slices.Equal(o.excluded, []string{"kube-system", "lameduck"}) {
		t.Errorf("%+v", o)
	}
	o, err = parse(append(with(t, good(t), "logLevel: debug"), "--namespace=x"), env, nil)
	if err != nil || !slices.Equal(o.excluded, []string{"kube-system", "x"}) || o.LogLevel.String() != "DEBUG" {
		t.Errorf("%+v, %v", o, err)
	}
}

// Each bad flag or key is named with its value, before anything listens. Without this, a pod that
// does not start says nothing useful.
func TestBadFlags(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		text string
		args []string
		want []string
	}{
		"unknown":                  {"", []string{"--nonsense"}, []string{"-nonsense"}},
		"an argument":              {"", []string{"serve"}, []string{`unexpected argument "serve"`}},
		"hold that is no duration": {"times: {hold: '2'}", nil, []string{`"2"`, "times.hold"}},
		"hold too long": {"times: {hold: 4s}", nil,
			[]string{"times", "webhook timeout 4s must be more than hold 4s"}},
		"hold negative": {"times: {hold: -1s}", nil, []string{"times", "hold -1s must be positive"}},
		"webhook timeout": {"times: {webhook: 31s}", nil,
			[]string{"times", "webhook timeout 31s must be at most 30s"}},
		"deadline": {"times: {deadline: 10m}", nil, []string{"times", "deadline 10m0s"}},
		"idle bound": {"times: {idleBound: 0s}", nil,
			[]string{"times", "idle bound 0s must be positive"}},
		"dashboard": {"addresses: {dashboard: '9445'}", nil,
			[]string{`addresses.dashboard "9445": not a host:port`}},
		"max holds": {"holds: {most: 0}", nil, []string{"holds.most 0: must be 1 to 10000"}},
		"max holds per owner": {"holds: {perOwner: 0}", nil,
			[]string{"holds.perOwner 0: must be 1 to 10000"}},
		"shutdown delay": {"times: {shutdownDelay: -1s}", nil,
			[]string{"times.shutdownDelay -1s: must be 0s to 1m"}},
		"max holds that is a word": {"holds: {most: many}", nil, []string{"holds.most"}},
		"log level":                {"logLevel: loud", nil, []string{`"loud"`, "logLevel"}},
		"namespace": {"", []string{"--namespace", "Not_One"},
			[]string{`--namespace "Not_One": not a namespace's name`}},
		"no namespace": {"", []string{"--namespace", ""},
			[]string{`--namespace "": required, or set POD_NAMESPACE`}},
		"no replica": {"", []string{"--replica", ""}, []string{`--replica "": required, or set POD_NAME`}},
		"excluded namespace": {"excludedNamespaces: [a, B]", nil,
			[]string{`excludedNamespaces: "B" is not a namespace's name`}},
		"certificates": {"certificates: {dir: /nowhere}", nil,
			[]string{`certificates.dir "/nowhere"`, "tls.crt", "tls.key"}},
		"certificates of replicas": {"", []string{"--token-file", empty}, []string{`no ca.crt`, "verify each other"}},
		"no secret": {"certificates: {admissionSecretFile: /nowhere}", nil,
			[]string{`certificates.admissionSecretFile "/nowhere"`, "no such file", "kubectl"}},
		"an empty secret": {"certificates: {admissionSecretFile: " + empty + "}", nil,
			[]string{"certificates.admissionSecretFile", "the file is empty", "kubectl"}},
		"barrier bound": {"barrier: {bound: 1500ms}", nil,
			[]string{"barrier.bound 1.5s: must be whole seconds"}},
		"barrier port": {"barrier: {port: 0}", nil,
			[]string{"barrier.port 0: must be 1 to 65535"}},
		"barrier ask":   {"barrier: {ask: everybody}", nil, []string{`"everybody"`}},
		"barrier image": {"barrier: {image: ''}", nil, []string{`barrier.image "": must be a container image`}},
		"kubeconfig":    {"", []string{"--kubeconfig", "/nowhere"}, []string{`--kubeconfig "/nowhere"`}},
		"admission address": {"addresses: {admission: '9443'}", nil,
			[]string{`addresses.admission "9443": not a host:port`}},
		"agents address": {"addresses: {agents: ':99999'}", nil,
			[]string{`addresses.agents ":99999": not a host:port`}},
		"metrics address": {"addresses: {metrics: ''}", nil,
			[]string{`addresses.metrics "": not a host:port`}},
		"everything that is wrong": {"holds: {most: -3}\ntimes: {hold: 4s}", []string{"--replica", ""},
			[]string{"holds.most -3", "hold 4s", "--replica"}},
		"a deadline that is no duration": {"times: {deadline: soon}", nil, []string{`"soon"`, "times.deadline"}},
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			// What would listen would fail otherwise: the address is taken.
			taken := listener.Addr().String()
			all := good(t)
			all["addresses"] = map[string]any{"admission": taken, "agents": taken, "metrics": taken, "probes": taken,
				"dashboard": ""}
			args := append(with(t, all, c.text), c.args...)
			var stdout, stderr bytes.Buffer
			err = run(t.Context(), args, env, &stdout, &stderr)
			if !errors.Is(err, errUsage) {
				t.Fatalf("%v is not errUsage", err)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			if stdout.Len()+stderr.Len() > 0 {
				t.Errorf("written: %s%s", &stdout, &stderr)
			}
		})
	}
}

func TestHelp(t *testing.T) {
	for _, arg := range []string{"-h", "--help"} {
		var stdout, stderr bytes.Buffer
		err := run(t.Context(), []string{arg}, env, &stdout, &stderr)
		if !errors.Is(err, flag.ErrHelp) || errors.Is(err, errUsage) || stderr.Len() > 0 {
			t.Errorf("%s: %v, stderr %q", arg, err, &stderr)
		}
		for _, want := range []string{"holds deletions of pods", "-config", "-print-config", "-kubeconfig",
			"-namespace", "-replica", "-ordinal", "-token-file", "-version"} {
			if !strings.Contains(stdout.String(), want) {
				t.Errorf("%s does not tell of %s", arg, want)
			}
		}
	}
}

// It is asked of images, where there is neither a namespace nor a configuration.
func TestVersion(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if err := run(t.Context(), []string{"--version"}, func(string) string { return "" }, &stdout,
		&stderr); !errors.Is(err, errPrinted) {
		t.Errorf("%v, stderr %q", err, &stderr)
	}
	if !strings.HasPrefix(stdout.String(), "webhook dev, commit ") {
		t.Errorf("said %q", &stdout)
	}
}
