package discovery

import (
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

// secureServer returns a TLS server with a certificate of its own, and that.
func secureServer(t *testing.T) (address, ca string) {
	t.Helper()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE",
		Bytes: server.Certificate().Raw}))
}

// The CA changes while the agent runs, and a file that is bad for a moment takes nothing away.
// Without this, an agent loses all coordinators at their first rotation.
func TestBundleFollowsTheirFile(t *testing.T) {
	address, ca := secureServer(t)
	path := filepath.Join(t.TempDir(), "ca.crt")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(other)
	r, err := NewBundle(Config{CAFile: path, ServerName: "example.com"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	dial := func() error {
		conn, err := r.dial(t.Context(), "tcp", address)
		if err == nil {
			conn.Close()
		}
		return err
	}
	if dial() == nil {
		t.Fatal("a certificate of an unknown CA was accepted")
	}
	write(other + ca)
	if err := dial(); err != nil {
		t.Fatal(err)
	}
	write("nothing")
	if err := dial(); err != nil {
		t.Errorf("a bad file took the certificates away: %v", err)
	}
	write(other)
	if dial() == nil {
		t.Error("what is trusted no more was accepted")
	}
	r.conf.ServerName = "elsewhere"
	write(ca)
	if dial() == nil {
		t.Error("another name was accepted")
	}
}

// Without a certificate there is no connection, rather than one that trusts the system's.
func TestAnEmptyBundleTrustsNobody(t *testing.T) {
	address, ca := secureServer(t)
	r, err := NewBundle(Config{CAConfigMap: "a/b", ServerName: "example.com"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.dial(t.Context(), "tcp", address); err == nil {
		t.Error("connected without knowing whom to trust")
	}
	if r.set("") || !r.set(ca) {
		t.Error("what is no certificate was taken, or one was not")
	}
	conn, err := r.dial(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// other is a certificate without an owner.
const other = `-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUG7+2Bz2LrZWSdyS7g9u7CsnNIwwwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEyMTE2MDIyNVoYDzIxMjYxMDI4MTYw
MjI1WjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARusY9E04QwFUHZJ+SGBcVIDP1UqJiidxlQf+eH8sn+H0oFCvyKx7FhKvun3wNo
aRCKL7Kcz4C7Bzr4/iMthHGlo1MwUTAdBgNVHQ4EFgQU+EgdBvgtuS7slaIaXV3D
JuoNUuAwHwYDVR0jBBgwFoAU+EgdBvgtuS7slaIaXV3DJuoNUuAwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAQzkeIN1hRAcfkp6zORk3HIYGk+Gpw
1STC2u7vPnPlbgIhAJVzUzcqVbxOyQ4Q2BbtsG88klDqIOIZLBJZCu7QRAQv
-----END CERTIFICATE-----
`
