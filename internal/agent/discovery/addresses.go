package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
)

const (
	// addressesName is the file in the journal's directory that names the coordinators.
	addressesName = "coordinators.json"
	// storeAgain is the pause before the file is written again when that has failed.
	storeAgain = time.Minute
)

// addresses stores the coordinators' addresses for an agent that starts while the API server is not
// available: without them it would learn of no drain. A stored address need not be trusted:
// whatever answers there has to prove that it is a coordinator.
type addresses struct {
	path string
	log  *slog.Logger
	wake signal.Signal
	last atomic.Pointer[[]string]
}

// rememberIn returns an addresses that stores them in dir. With an empty dir it stores nothing.
func rememberIn(dir string, log *slog.Logger) *addresses {
	a := &addresses{log: log, wake: signal.New()}
	if dir != "" {
		a.path = filepath.Join(dir, addressesName)
	}
	return a
}

// read returns the stored addresses, nil if there are none.
func (a *addresses) read() []string {
	if a.path == "" {
		return nil
	}
	var kept []string
	text, err := os.ReadFile(a.path)
	if err == nil {
		err = json.Unmarshal(text, &kept)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("read stored addresses of coordinators", "path", a.path, "error", err)
		return nil
	}
	return kept
}

// set records the addresses, which must not be changed afterwards. It never blocks. An empty list
// is ignored.
func (a *addresses) set(all []string) {
	if a.path == "" || len(all) == 0 {
		return
	}
	a.last.Store(&all)
	a.wake.Raise()
}

// run writes recorded addresses until ctx is done.
func (a *addresses) run(ctx context.Context) error {
	had := a.read()
	return a.wake.Follow(ctx, func() {
		last := *a.last.Load()
		if slices.Equal(last, had) {
			return
		}
		if err := a.write(last); err != nil {
			a.log.Warn("store addresses of coordinators", "path", a.path, "error", err)
			time.AfterFunc(storeAgain, a.wake.Raise)
			return
		}
		had = last
	})
}

// write replaces the file atomically.
func (a *addresses) write(all []string) error {
	text, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("encode addresses: %w", err)
	}
	if err := os.WriteFile(a.path+".new", append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(a.path+".new", a.path)
}
