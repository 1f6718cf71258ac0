package client

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// lines reads the messages of a stream.
type lines struct {
	scanner *bufio.Scanner
	from    counted
	// taken counts the bytes of the lines that were returned.
	taken int
}

// counted counts the bytes that were read.
type counted struct {
	io.Reader
	read int
}

func (c *counted) Read(into []byte) (int, error) {
	n, err := c.Reader.Read(into)
	c.read += n
	return n, err
}

func newLines(r io.Reader) *lines {
	l := &lines{from: counted{Reader: r}}
	l.scanner = bufio.NewScanner(&l.from)
	l.scanner.Buffer(nil, maxLine)
	l.scanner.Split(func(data []byte, end bool) (int, []byte, error) {
		n, line, err := bufio.ScanLines(data, end)
		l.taken += n
		return n, line, err
	})
	return l
}

// more reports whether bytes that arrived with the last message are still to be read.
func (l *lines) more() bool { return l.from.read > l.taken }

// next returns the next message. At the end of the stream the error is [io.EOF].
func (l *lines) next() (wire.Message, error) {
	var m wire.Message
	if !l.scanner.Scan() {
		if err := l.scanner.Err(); err != nil {
			return m, err
		}
		return m, io.EOF
	}
	if err := json.Unmarshal(l.scanner.Bytes(), &m); err != nil {
		return m, fmt.Errorf("message %.200q: %w", l.scanner.Text(), err)
	}
	return m, nil
}
