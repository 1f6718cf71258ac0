// Package cli has what Lameduck's commands share: their exit codes, their end on signals, and
// checks of flags.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

var (
	// ErrUsage wraps errors in flags or in the configuration file. They are reported before
	// anything listens, with exit code 2.
	ErrUsage = errors.New("bad usage")
	// ErrPrinted ends a command that was asked for its configuration or version alone.
	ErrPrinted = errors.New("printed")
	// ErrUnchecked wraps why something could not be checked, which is not the same as a bad result.
	ErrUnchecked = errors.New("not checked")
)

// Run is a whole command. getenv gives the environment.
type Run func(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) error

// Main runs the command of that name until SIGTERM or an interrupt, and exits with 2 after an
// [ErrUsage] or an [ErrUnchecked] and 1 after any other error.
func Main(name string, run Run) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	if err == nil || errors.Is(err, flag.ErrHelp) || errors.Is(err, ErrPrinted) {
		return
	}
	fmt.Fprintf(Printable{os.Stderr}, "%s: %v\n", name, err)
	if errors.Is(err, ErrUsage) || errors.Is(err, ErrUnchecked) {
		os.Exit(2)
	}
	os.Exit(1)
}

// Parse parses a command line that has only flags. For --help it prints about and the flags to out,
// and returns flag.ErrHelp. Any other error wraps [ErrUsage].
func Parse(f *flag.FlagSet, args []string, about string, out io.Writer) error {
	f.SetOutput(io.Discard)
	err := f.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(out, "%s\n\nFlags:\n", about)
		f.SetOutput(out)
		f.PrintDefaults()
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUsage, err)
	case f.NArg() > 0:
		return fmt.Errorf("%w: unexpected argument %q", ErrUsage, f.Arg(0))
	}
	return nil
}

// HostPort checks the syntax of an address to listen at, without resolving names.
func HostPort(text string) error {
	_, port, err := net.SplitHostPort(text)
	if err != nil {
		return err
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err
}
