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

	"github.com/lameduck-io/lameduck/internal/signal"
)

// addressesName is the file in the journal's directory that names the coordinators.
const addressesName = "coordinators.json"

// addresses keeps where the coordinators were last, for an agent that starts while the API server
// cannot be asked: without them it would hear of no drain. What is written there is believed no
// more than any address: whoever answers has to prove that it is a coordinator.
type addresses struct {
	path string
	log  *slog.Logger
	wake signal.Signal
	last atomic.Pointer[[]string]
}

// rememberIn returns what keeps addresses in dir. An empty dir means that nothing is kept.
func rememberIn(dir string, log *slog.Logger) *addresses {
	a := &addresses{log: log, wake: signal.New()}
	if dir != "" {
		a.path = filepath.Join(dir, addressesName)
	}
	return a
}

// read returns what was kept, nil if nothing was.
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
		a.log.Warn("where the coordinators were is not known", "path", a.path, "error", err)
		return nil
	}
	return kept
}

// set notes the addresses, which must not be changed afterwards. It never blocks. That there is
// none is not worth knowing later.
func (a *addresses) set(all []string) {
	if a.path == "" || len(all) == 0 {
		return
	}
	a.last.Store(&all)
	a.wake.Raise()
}

// run writes what is noted until ctx is done.
func (a *addresses) run(ctx context.Context) error {
	had := a.read()
	return a.wake.Follow(ctx, func() {
		last := *a.last.Load()
		if slices.Equal(last, had) {
			return
		}
		if err := a.write(last); err != nil {
			a.log.Warn("addresses of coordinators are not kept", "path", a.path, "error", err)
			return
		}
		had = last
	})
}

// write replaces the file at once, so that it is never half of one.
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
