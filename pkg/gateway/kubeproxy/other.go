//go:build !linux

package kubeproxy

import (
	"errors"
	"log/slog"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// Check implements gateway.Kind.
func (*Config) Check() []error { return []error{errors.New("kube-proxy's rules need Linux")} }

// Observe implements gateway.ObservedKind. No configuration has passed Check.
func (*Config) Observe(*slog.Logger) gateway.Observed { return nil }
