//go:build !linux

package sockets

import (
	"errors"
	"time"
)

var errNoLinux = errors.New("sockets need Linux")

// List fails.
func List() ([]Socket, error) { return nil, errNoLinux }

// Close fails.
func (s Socket) Close(time.Duration) (bool, error) { return false, errNoLinux }

// CanClose fails.
func CanClose() error { return errNoLinux }
