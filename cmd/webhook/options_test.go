package main

import (
	"bytes"
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
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

// files are the arguments that name files that must be there.
func files(t *testing.T) []string {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--cert-dir", certificates(t), "--admission-secret-file", secret}
}

func env(name string) string {
	return map[string]string{"POD_NAME": "webhook-0", "POD_NAMESPACE": "lameduck"}[name]
}

func TestDefaults(t *testing.T) {
	o, err := parse(files(t), env, nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.namespace != "lameduck" || o.replica != "webhook-0" || o.Holds.Most != 64 || o.Holds.PerOwner != 8 ||
		o.times.Hold != 2*time.Second ||
		!slices.Equal(o.excluded, []string{"kube-system", "lameduck"}) {
		t.Errorf("%+v", o)
	}
	o, err = parse(append(files(t), "--namespace=x", "--log-level=debug"), env, nil)
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
	good := files(t)
	set := func(text string) []string { return file(t, head+text) }
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"unknown":                  {[]string{"--nonsense"}, []string{"-nonsense"}},
		"an argument":              {[]string{"serve"}, []string{`unexpected argument "serve"`}},
		"hold that is no duration": {set("times: {hold: '2'}"), []string{`"2"`, "times.hold"}},
		"hold too long": {set("times: {hold: 4s}"),
			[]string{"times", "webhook timeout 4s must be more than hold 4s"}},
		"hold negative": {set("times: {hold: -1s}"), []string{"times", "hold -1s must be positive"}},
		"webhook timeout": {set("times: {webhook: 31s}"),
			[]string{"times", "webhook timeout 31s must be at most 30s"}},
		"deadline": {set("times: {deadline: 10m}"), []string{"times", "deadline 10m0s"}},
		"idle bound": {set("times: {idleBound: 0s}"),
			[]string{"times", "idle bound 0s must be positive"}},
		"dashboard": {[]string{"--dashboard-address", "9445"},
			[]string{`--dashboard-address "9445": not a host:port`}},
		"max holds": {set("holds: {most: 0}"), []string{"holds.most 0: must be 1 to 10000"}},
		"max holds per owner": {set("holds: {perOwner: 0}"),
			[]string{"holds.perOwner 0: must be 1 to 10000"}},
		"shutdown delay": {[]string{"--shutdown-delay", "-1s"},
			[]string{"times.shutdownDelay -1s: must be 0s to 1m"}},
		"max holds that is a word": {set("holds: {most: many}"), []string{"holds.most"}},
		"log level":                {[]string{"--log-level", "loud"}, []string{`"loud"`, "-log-level"}},
		"namespace": {[]string{"--namespace", "Not_One"},
			[]string{`--namespace "Not_One": not a namespace's name`}},
		"no namespace": {[]string{"--namespace", ""},
			[]string{`--namespace "": required, or set POD_NAMESPACE`}},
		"no replica": {[]string{"--replica", ""}, []string{`--replica "": required, or set POD_NAME`}},
		"excluded namespace": {set("excludedNamespaces: [a, B]"),
			[]string{`excludedNamespaces: "B" is not a namespace's name`}},
		"certificates": {[]string{"--cert-dir", "/nowhere"},
			[]string{`--cert-dir "/nowhere"`, "tls.crt", "tls.key"}},
		"certificates of replicas": {[]string{"--token-file", empty}, []string{`no ca.crt`, "verify each other"}},
		"no secret": {[]string{"--admission-secret-file", "/nowhere"},
			[]string{`--admission-secret-file "/nowhere"`, "no such file", "kubectl"}},
		"an empty secret": {[]string{"--admission-secret-file", empty},
			[]string{"--admission-secret-file", "the file is empty", "kubectl"}},
		"barrier bound": {set("barrier: {bound: 1500ms}"),
			[]string{"barrier.bound 1.5s: must be whole seconds"}},
		"barrier port": {set("barrier: {port: 0}"),
			[]string{"barrier.port 0: must be 1 to 65535"}},
		"barrier ask":   {set("barrier: {ask: everybody}"), []string{`"everybody"`}},
		"barrier image": {set("barrier: {image: ''}"), []string{`barrier.image "": must be a container image`}},
		"kubeconfig":    {[]string{"--kubeconfig", "/nowhere"}, []string{`--kubeconfig "/nowhere"`}},
		"admission address": {[]string{"--admission-address", "9443"},
			[]string{`--admission-address "9443": not a host:port`}},
		"agents address": {[]string{"--agents-address", ":99999"},
			[]string{`--agents-address ":99999": not a host:port`}},
		"metrics address": {[]string{"--metrics-address", ""},
			[]string{`--metrics-address "": not a host:port`}},
		"everything that is wrong": {append(set("holds: {most: -3}\ntimes: {hold: 4s}"), "--replica", ""),
			[]string{"holds.most -3", "hold 4s", "--replica"}},
		"a deadline that is no duration": {set("times: {deadline: soon}"), []string{`"soon"`, "times.deadline"}},
	} {
		t.Run(name, func(t *testing.T) {
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			// What would listen would fail otherwise: the address is taken.
			taken := listener.Addr().String()
			args := slices.Concat(good, []string{"--admission-address", taken, "--agents-address", taken,
				"--metrics-address", taken, "--probes-address", taken, "--dashboard-address", ""}, c.args)
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
		for _, want := range []string{"holds deletions of pods", "-admission-address", "-admission-secret-file",
			"-agents-address", "-cert-dir", "-dashboard-address", "-config", "-print-config", "-kubeconfig",
			"-log-level",
			"-metrics-address", "-namespace", "-probes-address", "-replica", "-shutdown-delay", "-version"} {
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
