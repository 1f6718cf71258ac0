//go:build !linux

package probe

import (
	"context"
	"errors"
)

// Run fails: active checks need Linux.
func (r *Runner) Run(context.Context) error {
	return errors.New("active checks need Linux")
}

// Wake does nothing.
func (r *Runner) Wake() {}

type flight struct{}
