package admission

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Path is the path of reviews of deletions, without its last segment, the secret. See [SecretPath].
const Path = "/v1/admit/"

const (
	// minSecret is how many characters a secret has at least.
	minSecret = 16
	// maxSecret bounds the file, in bytes.
	maxSecret = 4 << 10
	// secretEvery is how often the file is read. A mounted Secret takes a minute to arrive, so
	// reading more often gains nothing.
	secretEvery = 5 * time.Second
	// FormerSecret is how long a secret that was removed from the file is still accepted at most:
	// the webhook configuration and the replicas' files never change at the same moment.
	FormerSecret = 2 * time.Minute
	// handover is how long it is still accepted after a call with a secret that is in the file.
	// Other API servers may receive the new configuration later.
	handover = 10 * time.Second
	// strangerEvery is how often refused calls are logged.
	strangerEvery = 10 * time.Second
)

// SecretPath passes on only calls with a secret in their path. Otherwise any client that can
// connect could post a review and have pods taken out of gateways. The secret is the last segment
// of the path, because the path is all of a call that a webhook configuration can choose. Only
// clients that may read webhook configurations or the Secret can learn it. It is never logged.
//
// The secrets are the lines of a file. Every line is accepted, so that all replicas can accept a
// new secret before the API server uses it. A removed line is accepted for [FormerSecret] more, but
// only for 10 s after the first call with a secret that is in the file. Calls with the removed
// secret do not extend this. A restart of the process ends it.
type SecretPath struct {
	file    string
	log     *slog.Logger
	metrics *Metrics
	said    rate.Sometimes

	mu sync.Mutex
	// keys has the hashes of the secrets, so that the comparison takes the same time for secrets of
	// any length. The value is when the secret ends. The zero time: the secret is in the file.
	keys map[[sha256.Size]byte]time.Time
}

// OpenSecretPath reads the secrets in file. Its errors explain what to write into it.
func OpenSecretPath(file string, log *slog.Logger, metrics *Metrics) (*SecretPath, error) {
	d := &SecretPath{file: file, log: log, metrics: metrics, said: rate.Sometimes{Interval: strangerEvery}}
	if _, err := d.load(time.Now()); err != nil {
		return nil, err
	}
	return d, nil
}

// NewSecretPath returns a secret path without a file. It refuses all calls until [SecretPath.Set]
// is called.
func NewSecretPath(log *slog.Logger, metrics *Metrics) *SecretPath {
	return &SecretPath{log: log, metrics: metrics, said: rate.Sometimes{Interval: strangerEvery}}
}

// Set replaces the secrets, as if they were the lines of a file. It reports whether they differ
// from those before.
func (d *SecretPath) Set(secrets []string) (changed bool) { return d.take(time.Now(), secrets) }

// CheckSecretFile returns the error that [OpenSecretPath] would return for file. Nil: the file is
// valid.
func CheckSecretFile(file string) error {
	_, err := readSecrets(file)
	return err
}

// Run reads the file repeatedly until ctx is done. Without a file it only waits. If the file cannot
// be used, the secrets that were read before stay accepted.
func (d *SecretPath) Run(ctx context.Context) error {
	ticker := time.NewTicker(secretEvery)
	defer ticker.Stop()
	bad := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if d.file == "" {
				continue
			}
		}
		changed, err := d.load(time.Now())
		switch {
		case err != nil && !bad:
			d.log.Error("read admission secrets: the former ones stay valid", "error", err)
		case changed:
			d.log.Info("admission secrets changed", "former", FormerSecret.String())
		}
		bad = err != nil
	}
}

// load reads the file, and reports whether its secrets differ from those before.
func (d *SecretPath) load(now time.Time) (changed bool, err error) {
	secrets, err := readSecrets(d.file)
	if err != nil {
		return false, err
	}
	return d.take(now, secrets), nil
}

// take replaces the secrets that are in the file.
func (d *SecretPath) take(now time.Time, secrets []string) (changed bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys := map[[sha256.Size]byte]time.Time{}
	for _, s := range secrets {
		sum := sha256.Sum256([]byte(s))
		until, known := d.keys[sum]
		keys[sum], changed = time.Time{}, changed || !known || !until.IsZero()
	}
	for sum, until := range d.keys {
		if _, stands := keys[sum]; stands {
			continue
		}
		if until.IsZero() {
			until, changed = now.Add(FormerSecret), true
		}
		if now.Before(until) {
			keys[sum] = until
		}
	}
	d.keys = keys
	return changed
}

// knows reports whether secret is accepted at now. If the secret is in the file, secrets that were
// removed from the file end within 10 s. The time that knows takes reveals nothing about the
// secrets.
func (d *SecretPath) knows(now time.Time, secret string) bool {
	sum := sha256.Sum256([]byte(secret))
	d.mu.Lock()
	defer d.mu.Unlock()
	stands, former := 0, 0
	for of, until := range d.keys {
		same := subtle.ConstantTimeCompare(sum[:], of[:])
		switch {
		case until.IsZero():
			stands |= same
		case now.Before(until):
			former |= same
		}
	}
	if end := now.Add(handover); stands == 1 {
		for of, until := range d.keys {
			if end.Before(until) {
				d.keys[of] = end
			}
		}
	}
	return stands|former == 1
}

// Guard returns a handler that passes on calls with an accepted secret: reviews of deletions on
// [Path], reviews of creations on [MutatePath]. Everything else gets the same 404, whether the path
// is unknown or the secret wrong, and before its body is read.
func (d *SecretPath) Guard(deletions, creations http.Handler) http.Handler {
	paths := map[string]http.Handler{Path: deletions, MutatePath: creations}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := strings.LastIndexByte(r.URL.Path, '/') + 1
		next, ok := paths[r.URL.Path[:at]]
		if !d.knows(time.Now(), r.URL.Path[at:]) || !ok {
			d.metrics.refused(http.StatusNotFound)
			d.said.Do(func() {
				d.log.Warn("refused a call without the admission secret: if it is the API server, deletions do not "+
					"wait", "from", r.RemoteAddr)
			})
			w.Header().Set("Connection", "close")
			http.Error(w, "404 page not found", http.StatusNotFound)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// howTo is the instruction for operators to write a usable secret.
const howTo = `write a line of at least 16 letters and digits into it: ` +
	`kubectl -n lameduck-system create secret generic lameduck-admission ` +
	`--from-literal=secret="$(openssl rand -hex 32)"`

// readSecrets returns the lines of file that are not empty. Its errors never quote them.
func readSecrets(file string) ([]string, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("admission secret: %w; %s", err, howTo)
	}
	if info.Size() > maxSecret {
		return nil, fmt.Errorf("admission secret in %s: the file has %d bytes, more than %d; %s", file, info.Size(),
			maxSecret, howTo)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("admission secret: %w; %s", err, howTo)
	}
	var secrets []string
	for n, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			continue
		case len(line) < minSecret:
			return nil, fmt.Errorf("admission secret in %s: line %d has %d characters; %s", file, n+1, len(line), howTo)
		case strings.Trim(line, unreserved) != "":
			return nil, fmt.Errorf("admission secret in %s: line %d has a character that is not a letter, a digit, "+
				"- or _; %s", file, n+1, howTo)
		}
		secrets = append(secrets, line)
	}
	if len(secrets) == 0 {
		return nil, fmt.Errorf("admission secret in %s: the file is empty; %s", file, howTo)
	}
	return secrets, nil
}

// unreserved are the characters that need no escape in a path, without . and ~, which some tools
// change.
const unreserved = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
