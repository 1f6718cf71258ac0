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

// Path is where the API server asks, but for the last segment: the secret. See [SecretPath].
const Path = "/v1/admit/"

const (
	// minSecret is how many characters a secret has at least.
	minSecret = 16
	// maxSecret bounds the file, in bytes.
	maxSecret = 4 << 10
	// secretEvery is how often the file is read. A mounted Secret takes a minute to arrive, so that
	// more haste gains nothing.
	secretEvery = 5 * time.Second
	// FormerSecret is how long a secret that was taken out is still good at most: the API server's
	// configuration and what the replicas know never change at the same time.
	FormerSecret = 2 * time.Minute
	// handover is how long it is still good once an API server was seen to use another one. Other
	// API servers may learn of that later.
	handover = 10 * time.Second
	// strangerEvery is how often a line is logged that somebody was turned away.
	strangerEvery = 10 * time.Second
)

// SecretPath lets those through to a handler who know a secret: whoever could post a review could
// have pods unrouted. The secret is the last segment of the path, because that is all of a call
// that a webhook configuration chooses, and is known to those alone who may read webhook
// configurations or the Secret. It is never logged.
//
// The secrets are the lines of a file. Each line is good, so that a new one can be known to all
// replicas before the API server uses it. A line that is taken out is good for [FormerSecret] more,
// in this life of the process, and for 10 s at most after a call with a secret that is in the file.
// A call with the former secret changes nothing: a thief cannot keep it good.
type SecretPath struct {
	file    string
	log     *slog.Logger
	metrics *Metrics
	said    rate.Sometimes

	mu sync.Mutex
	// keys are the hashes of secrets, so that secrets of any length compare in the same time, and
	// when each ends. The zero time: it stands in the file.
	keys map[[sha256.Size]byte]time.Time
}

// OpenSecretPath reads the secrets in file. Its errors say what to write into it.
func OpenSecretPath(file string, log *slog.Logger, metrics *Metrics) (*SecretPath, error) {
	d := &SecretPath{file: file, log: log, metrics: metrics, said: rate.Sometimes{Interval: strangerEvery}}
	if _, err := d.load(time.Now()); err != nil {
		return nil, err
	}
	return d, nil
}

// NewSecretPath returns a secret path without a file. Until [SecretPath.Set] is called nobody is
// let through.
func NewSecretPath(log *slog.Logger, metrics *Metrics) *SecretPath {
	return &SecretPath{log: log, metrics: metrics, said: rate.Sometimes{Interval: strangerEvery}}
}

// Set has secrets be those that are good, as if a file had them. It reports whether they are other
// than before.
func (d *SecretPath) Set(secrets []string) (changed bool) { return d.take(time.Now(), secrets) }

// CheckSecretFile reports why no [SecretPath] can be made with file. Nil: one can.
func CheckSecretFile(file string) error {
	_, err := readSecrets(file)
	return err
}

// Run reads the file again and again until ctx is done; without one it only waits. A file that
// cannot be used leaves what is known as it is.
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
			d.log.Error("read admission secrets again: the former ones stay good", "error", err)
		case changed:
			d.log.Info("admission secrets changed", "former", FormerSecret.String())
		}
		bad = err != nil
	}
}

// load takes in what stands in the file now, and reports whether that is other than before.
func (d *SecretPath) load(now time.Time) (changed bool, err error) {
	secrets, err := readSecrets(d.file)
	if err != nil {
		return false, err
	}
	return d.take(now, secrets), nil
}

// take has secrets be those that stand.
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

// knows reports whether secret is good at now, and has the former ones end soon if it is one that
// stands. How long that takes tells a caller without a good secret nothing.
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

// Guard returns a handler that passes on what comes with a good secret: on [Path] reviews of
// deletions, on [MutatePath] reviews of creations. Everything else gets the same 404, whether the
// path is unknown or the secret wrong, before anything of its body is read.
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

// howTo is what an operator does about a secret that cannot be used.
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

// unreserved are the characters that look the same in a path however it is written. Not . and ~,
// which some tools change.
const unreserved = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
