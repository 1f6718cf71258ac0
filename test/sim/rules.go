package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// A mutation is a patch in mutations: a rule of the design, and the lines that break it. Product
// code knows nothing of it.

// outsideMost is how many seeds are run with the checks that look inside switched off. What needs
// more takes minutes, and is only told.
const outsideMost = 100

// tryMutations builds a simulation for each patch in dir, runs it, and prints on out which check
// noticed it. root is the directory of the module. The error names the mutations that no check
// notices.
func tryMutations(out io.Writer, root, dir string, from uint64, most int) error {
	patches, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil || len(patches) == 0 {
		return errors.Join(fmt.Errorf("%s has no patches", dir), err)
	}
	tmp, err := os.MkdirTemp("", "sim-mutations-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	type built struct {
		name, words, binary string
		err                 error
	}
	next := make(chan built, 1) // the next is built while one runs
	go func() {
		defer close(next)
		for _, patch := range patches {
			b := built{name: strings.TrimSuffix(filepath.Base(patch), ".patch")}
			b.binary = filepath.Join(tmp, b.name)
			b.words, b.err = buildMutant(root, patch, b.binary)
			next <- b
		}
	}()
	var missed []error
	for b := range next {
		if b.err != nil {
			missed = append(missed, b.err)
			continue
		}
		cmd := exec.Command(b.binary, "-hunt", "-seeds", fmt.Sprint(most), "-from", fmt.Sprint(from))
		cmd.Stderr = out
		said, err := cmd.Output()
		if err != nil {
			missed = append(missed, fmt.Errorf("%s: %w", b.name, err))
		}
		_, _ = fmt.Fprintf(out, "%-24s %s  (%s)\n", b.name, strings.TrimSpace(string(said)), b.words)
		_ = os.Remove(b.binary)
	}
	return errors.Join(missed...)
}

// buildMutant builds the simulation with one patch applied, and returns the words of the patch.
func buildMutant(root, patch, binary string) (words string, err error) {
	text, err := os.ReadFile(patch)
	if err != nil {
		return "", err
	}
	words, name, mutated, err := apply(root, string(text))
	if err != nil {
		return "", fmt.Errorf("%s: %w", patch, err)
	}
	source, err := filepath.Abs(filepath.Join(root, name))
	if err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {source: binary + ".go"}})
	if err := errors.Join(err, os.WriteFile(binary+".go", []byte(mutated), 0o600),
		os.WriteFile(binary+".json", overlay, 0o600)); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-overlay", binary+".json", "-o", binary,
		"./test/sim")
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: build: %w\n%s", patch, err, said)
	}
	return words, nil
}

// apply applies a unified diff of one file below root, and returns the words above it, the file's
// name, and the file as it is then. Hunks are found by their lines, wherever these are: a hunk
// whose lines are not in the file exactly once is an error, and so is a patch that changes nothing.
func apply(root, patch string) (words, name, mutated string, err error) {
	head, hunks, found := strings.Cut(patch, "\n@@")
	if !found {
		return "", "", "", errors.New("it has no hunks")
	}
	for line := range strings.Lines(head) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "# ") {
			words = strings.TrimSpace(words + line[1:])
		} else if file, ok := strings.CutPrefix(line, "+++ b/"); ok {
			name = file
		}
	}
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return "", "", "", err
	}
	mutated = "\n" + string(text)
	for hunk := range strings.SplitSeq(hunks, "\n@@") {
		before, after := "\n", "\n" // whole lines
		_, lines, _ := strings.Cut(hunk, "\n")
		for line := range strings.Lines(strings.TrimSuffix(lines, "\n") + "\n") {
			if line[0] != '+' {
				before += line[1:]
			}
			if line[0] != '-' {
				after += line[1:]
			}
		}
		if n := strings.Count(mutated, before); n != 1 {
			return "", "", "", fmt.Errorf("its lines are %d times in %s, not once:\n%s", n, name, before)
		}
		mutated = strings.Replace(mutated, before, after, 1)
	}
	if mutated = mutated[1:]; words == "" || mutated == string(text) {
		return "", "", "", errors.New("it changes nothing, or does not say in its first line what it breaks")
	}
	return words, name, mutated, nil
}

var errNotCaught = errors.New("a rule is broken, and no check notices it")

// hunt runs seeds until a check notices that a rule is broken, and prints which.
func hunt(seeds []uint64) error {
	all := sweep(seeds, true, false, nil)
	outside := sweep(seeds[:min(len(seeds), outsideMost)], true, true, nil)
	fmt.Printf("%s; from outside: %s\n", caught(all), caught(outside))
	if all.violations == 0 {
		return errNotCaught
	}
	return nil
}

func caught(t totals) string {
	if t.violations == 0 {
		return fmt.Sprintf("NOT caught in %d seeds", t.seeds)
	}
	return fmt.Sprintf("caught in %4d seeds by %-9s", t.seeds, t.check)
}
