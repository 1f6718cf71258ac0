package programs

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// every is the time between two lines about a build.
const every = 20 * time.Second

// build builds programs into p.built. The caller holds the lock.
func (p pin) build(ctx context.Context, progress io.Writer, programs []program) error {
	if len(programs) == 0 {
		return nil
	}
	partial := filepath.Join(p.built, ".partial")
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("remove the remains of an earlier build: %w", err)
	}
	if err := os.MkdirAll(partial, 0o755); err != nil {
		return fmt.Errorf("make room for Kubernetes: %w", err)
	}
	defer os.Remove(p.built) // if it is empty
	defer os.RemoveAll(partial)

	names := map[string]string{} // in partial, by the program's
	var packages, titles []string
	for _, g := range programs {
		titles = append(titles, g.name+" "+p.version(g.name))
		names[g.name] = g.name
		if !strings.HasSuffix(g.name, ".test") {
			packages = append(packages, g.pkg)
			names[g.name] = path.Base(strings.TrimSuffix(g.pkg, "/v3")) // as go build names it
		}
	}
	fmt.Fprintf(progress, "building %s from source, once; it takes minutes\n", strings.Join(titles, ", "))
	// One go build for all compiles one program while it links another.
	if err := p.compile(ctx, progress, partial, packages); err != nil {
		return err
	}
	for _, g := range programs {
		if strings.HasSuffix(g.name, ".test") {
			fmt.Fprintf(progress, "  %s\n", g.name)
			out := filepath.Join(partial, g.name)
			if err := p.run(ctx, progress, &tally{}, "test", "-c", "-o", out, g.pkg); err != nil {
				return err
			}
		}
	}
	for name, from := range names {
		if err := os.Rename(filepath.Join(partial, from), filepath.Join(p.built, name)); err != nil {
			return fmt.Errorf("keep what was built: %w", err)
		}
	}
	return nil
}

// compile builds packages into a folder.
func (p pin) compile(ctx context.Context, progress io.Writer, dir string, packages []string) error {
	fmt.Fprintln(progress, "  getting the source code")
	var list tally
	if err := p.run(ctx, progress, &list, append([]string{"list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}"},
		packages...)...); err != nil {
		return err
	}
	todo := tally{total: list.packages}
	fmt.Fprintf(progress, "  compiling %d packages\n", todo.total)
	return p.run(ctx, progress, &todo, append([]string{"build", "-v", "-o", dir + "/"}, packages...)...)
}

// tally counts the packages in the output of a go command.
type tally struct {
	total int // 0: unknown

	mu       sync.Mutex
	packages int
	line     []byte          // the beginning of the next
	text     strings.Builder // the other lines
}

func (t *tally) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line = append(t.line, p...)
	for {
		line, rest, ok := bytes.Cut(t.line, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		if t.line = rest; bytes.ContainsAny(line, " \t:") {
			t.text.Write(line)
			t.text.WriteByte('\n')
		} else {
			t.packages++
		}
	}
}

// estimate says how many packages are compiled and, from what those took, how long it takes until
// all are.
func (t *tally) estimate(elapsed time.Duration) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.total == 0:
		return ""
	case t.packages >= t.total:
		return ": linking"
	case t.packages < t.total/20:
		return fmt.Sprintf(": %d of %d", t.packages, t.total)
	}
	left := time.Duration(float64(elapsed) * float64(t.total-t.packages) / float64(t.packages))
	return fmt.Sprintf(": %d of %d, about %s left", t.packages, t.total, left.Round(10*time.Second))
}

// run runs a go command, and reports every now and then how far it is.
func (p pin) run(ctx context.Context, progress io.Writer, output *tally, args ...string) error {
	start := time.Now()
	verb, rest := args[:1], args[1:]
	cmd := exec.CommandContext(ctx, "go", slices.Concat(verb, p.flags, rest)...)
	cmd.Dir, cmd.Env = p.source, p.env
	cmd.Stdout, cmd.Stderr = output, output
	// go starts compilers: interrupted, it stops them and removes its temporary files.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("go %s: %w", verb[0], err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			fmt.Fprintf(progress, "  %s%s\n", time.Since(start).Round(time.Second), output.estimate(time.Since(start)))
		case err := <-done:
			if ctx.Err() != nil {
				return fmt.Errorf("go %s: %w", verb[0], context.Cause(ctx))
			}
			if err != nil {
				return fmt.Errorf("go %s %s: %w\n%s", verb[0], strings.Join(rest, " "), err,
					tail(output.text.String(), 20))
			}
			return nil
		}
	}
}
