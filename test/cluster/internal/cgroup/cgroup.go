// Package cgroup makes and removes the control groups of test machines, in version 2 and in every
// mounted hierarchy of version 1. Only control groups remain after the processes of a test have
// ended.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// root is where hierarchies are mounted: one itself in version 2, one below it for each set of
// controllers in version 1.
const root = "/sys/fs/cgroup"

// Unified reports whether this system has version 2 alone.
func Unified() bool { return is(root, unix.CGROUP2_SUPER_MAGIC) }

// Make makes the group with the given path ("run/node"), and those above it, in every hierarchy,
// ready to hold processes and groups. It is no error if it exists.
func Make(path string) error {
	if Unified() {
		return makeUnified(path)
	}
	mounts, err := hierarchies()
	if err != nil {
		return err
	}
	for _, mount := range mounts {
		dir := mount
		for part := range strings.SplitSeq(path, "/") {
			parent := dir
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make a control group: %w", err)
			}
			// Until both are filled in no process can join.
			for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
				value, err := os.ReadFile(filepath.Join(parent, name))
				if errors.Is(err, fs.ErrNotExist) {
					continue // another controller
				}
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, name), value, 0o644)
				}
				if err != nil {
					return fmt.Errorf("hand %s down to a control group: %w", name, err)
				}
			}
		}
	}
	return nil
}

func makeUnified(path string) error {
	dir := root
	for part := range strings.SplitSeq(path, "/") {
		controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if err != nil {
			return fmt.Errorf("make a control group: %w", err)
		}
		for controller := range strings.FieldsSeq(string(controllers)) {
			// A controller that is missing is reported where it is needed: some are not available
			// while real-time processes exist.
			_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644)
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make a control group: %w", err)
		}
	}
	return nil
}

// Remove removes the group and all below it, in every hierarchy. Its processes must have been
// killed; it waits up to 5 s for the last of them to be gone. It is no error if it does not exist.
func Remove(path string) error {
	mounts, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, mount := range mounts {
		if err := remove(filepath.Join(mount, path)); err != nil {
			errs = append(errs, fmt.Errorf("remove a control group: %w", err))
		}
	}
	return errors.Join(errs...)
}

func remove(group string) error {
	var groups []string
	err := filepath.WalkDir(group, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && entry.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Reverse(groups) // the innermost first
	for _, dir := range groups {
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := unix.Rmdir(dir)
			if err == nil || err == unix.ENOENT {
				break
			}
			if err != unix.EBUSY || time.Now().After(end) {
				return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
			}
		}
	}
	return nil
}

// hierarchies are the places where control groups can be made. Without any there is nothing to make
// or to remove.
func hierarchies() ([]string, error) {
	if Unified() {
		return []string{root}, nil
	}
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	var result []string
	for _, entry := range entries {
		// Links are other names of the same: cpu of cpu,cpuacct.
		path := filepath.Join(root, entry.Name())
		if entry.IsDir() && (is(path, unix.CGROUP_SUPER_MAGIC) || is(path, unix.CGROUP2_SUPER_MAGIC)) {
			result = append(result, path)
		}
	}
	return result, nil
}

func is(path string, magic int64) bool {
	var stat unix.Statfs_t
	return unix.Statfs(path, &stat) == nil &&
		int64(stat.Type) == magic //nolint:unconvert // it is an int32 on some architectures
}
