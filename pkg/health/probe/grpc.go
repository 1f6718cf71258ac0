package probe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// maxMessage bounds a HealthCheckResponse, in bytes. The response takes 7 bytes with its
	// prefix, and more with unknown fields.
	maxMessage = 1024
	// maxCall bounds the bytes that are read from one connection.
	maxCall = 64 << 10
	// servingBase is added to the serving status in [health.Outcome.Code], to keep it apart from
	// the gRPC statuses 1 to 16.
	servingBase = 100
	serving     = 1
)

// callHealth calls grpc.health.v1.Health/Check on a connection of its own, by HTTP/2 without TLS.
func callHealth(ctx context.Context, job *health.Job) health.Outcome {
	// The transport does not dial, because its dials would continue after the end of ctx.
	raw, err := dial(ctx, address(job))
	if err != nil {
		return failure(err)
	}
	defer raw.Close()
	// The HTTP/2 transport does not see the end of ctx while it waits for a peer that does not
	// read.
	defer context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })()
	conn := &bounded{raw, maxCall}
	plain := &http.Protocols{}
	plain.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		Protocols:   plain, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxCall,
	}
	// The message has one field, number 1: the service as a string. An empty service is omitted.
	var message []byte
	if s := job.Check.Service; s != "" {
		message = protowire.AppendString(protowire.AppendTag(message, 1, protowire.BytesType), s)
	}
	body := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))) // not compressed
	body = append(body, message...)
	req := (&http.Request{
		Method: http.MethodPost,
		URL:    &url.URL{Scheme: "http", Host: address(job).String(), Path: "/grpc.health.v1.Health/Check"},
		Host:   host(job),
		Header: http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"},
			"User-Agent": {"lameduck-health"}},
		// Without GetBody, the transport does not send the request again.
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}).WithContext(ctx)
	resp, err := transport.RoundTrip(req) //nolint:bodyclose // its connection is closed
	if err == nil {
		body, err = io.ReadAll(io.LimitReader(resp.Body, maxMessage+1))
	}
	if err != nil && ctx.Err() != nil {
		return failure(ctx.Err())
	}
	outcome := failure(err)
	switch {
	case err == nil:
		return judgeHealth(resp, body)
	case outcome == health.Outcome{Kind: health.TCPFailure} && !errors.Is(err, io.EOF) &&
		!errors.Is(err, io.ErrUnexpectedEOF):
		return malformed // the connection works, but the peer does not speak HTTP/2
	default:
		return outcome
	}
}

// bounded is a connection from which at most left bytes are read.
type bounded struct {
	*net.TCPConn
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, io.EOF
	}
	n, err := b.TCPConn.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// judgeHealth converts a complete answer to an outcome.
func judgeHealth(resp *http.Response, body []byte) health.Outcome {
	code := 0
	if resp.StatusCode != http.StatusOK {
		code = resp.StatusCode
	} else if text := cmp.Or(resp.Trailer.Get("Grpc-Status"), resp.Header.Get("Grpc-Status")); text != "0" {
		if n, err := strconv.ParseUint(text, 10, 8); err == nil {
			code = int(n)
		}
	} else if s, ok := servingStatus(body); ok {
		if s == serving {
			return health.Outcome{Kind: health.Success}
		}
		code = servingBase + s
	}
	return health.Outcome{Kind: health.HTTPFailure, Code: uint16(code)}
}

// servingStatus reads a HealthCheckResponse with the prefix of gRPC. Unknown fields are skipped.
func servingStatus(b []byte) (int, bool) {
	if len(b) < 5 || b[0] != 0 || int(binary.BigEndian.Uint32(b[1:])) != len(b)-5 {
		return 0, false
	}
	status := uint64(0)
	for b = b[5:]; len(b) > 0; {
		number, kind, n := protowire.ConsumeField(b)
		if n < 0 {
			return 0, false
		}
		if number == 1 && kind == protowire.VarintType {
			_, _, tag := protowire.ConsumeTag(b)
			status, _ = protowire.ConsumeVarint(b[tag:])
		}
		b = b[n:]
	}
	return int(min(status, 99)), true
}
