// Command release makes the files that users install from a commit, without Docker: images for
// several platforms, the manifests and the chart that name them by digest, archives of kubectl
// lameduck, and a list of contents for each program.
//
//	release images     images, as an OCI layout, and as an archive each
//	release push       of such a layout, to a registry
//	release manifests  manifests and chart, naming the images of a layout by digest
//	release all        images, manifests, kubectl lameduck and checksums
//
// The files are reproducible bit by bit from the same commit and version of Go: they contain no
// time but the commit's, no path, and no name of a computer.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// programs are those that have an image of their name.
var programs = []string{"webhook", "agent", "lameduck-wait"}

// options are the command line.
type options struct {
	root, out string
	registry  string
	version   string
	// download is where the files will be. Empty: not known, and no manifest for krew is made.
	download  string
	platforms []platform
}

func parse(args []string, out io.Writer) (options, error) {
	o := options{platforms: []platform{{"linux", "amd64"}, {"linux", "arm64"}}}
	f := flag.NewFlagSet("release", flag.ContinueOnError)
	f.SetOutput(out)
	f.StringVar(&o.root, "root", filepath.Join("..", ".."), "the tree to build")
	f.StringVar(&o.out, "out", "dist", "the folder for what is made; what an earlier run made there is replaced")
	f.StringVar(&o.registry, "registry", "docker.io/lameduck",
		"where images are, or will be: what comes before /webhook")
	f.StringVar(&o.version, "version", "dev", "tag of the images, and what programs answer to --version")
	f.StringVar(&o.download, "download", "", "for all: the URL of the folder in which users will find its files; "+
		"with it, a manifest for krew is made")
	f.Func("platforms", "comma-separated os/arch of the images (default linux/amd64,linux/arm64)",
		func(text string) error {
			o.platforms = nil
			for _, word := range strings.Split(text, ",") {
				system, arch, found := strings.Cut(word, "/")
				if !found || system != "linux" || arch == "" {
					return fmt.Errorf("%q is not linux/arch", word)
				}
				o.platforms = append(o.platforms, platform{system, arch})
			}
			return nil
		})
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return o, nil
}

// run is the whole program. getenv gives SOURCE_DATE_EPOCH.
func run(ctx context.Context, args []string, getenv func(string) string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("say what to make: images, push, manifests or all")
	}
	o, err := parse(args[1:], out)
	if err != nil {
		return err
	}
	if args[0] == "push" {
		return push(ctx, o, out)
	}
	s, err := readSource(ctx, o.root, o.version, getenv)
	if err != nil {
		return err
	}
	switch args[0] {
	case "images":
		return makeImages(ctx, s, o, out)
	case "manifests":
		return makeManifests(s, o, out)
	case "all":
		return makeAll(ctx, s, o, out)
	}
	return fmt.Errorf("%q: say images, push, manifests or all", args[0])
}
