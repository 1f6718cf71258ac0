//go:build !linux

package journal

func stampNow() Stamp { return wall() }
