//go:build !linux

package kernel

import (
	"errors"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// Direct implements gateway.DirectedKind.
func (*Config) Direct() (gateway.Directed, error) { return nil, errors.New("kernel: needs Linux") }
