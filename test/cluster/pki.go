package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

// CA is a certificate authority for one test: it is in memory only and good for a week.
type CA struct {
	certificate *x509.Certificate
	key         crypto.Signer
	pem         []byte
}

// NewCA returns a new authority.
func NewCA() (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generate the key of an authority: %w", err)
	}
	template, err := certificate("lameduck test authority")
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("create an authority: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("create an authority: %w", err)
	}
	return &CA{certificate: parsed, key: key, pem: encode("CERTIFICATE", der)}, nil
}

// PEM is the certificate of the authority, as a webhook configuration wants it in caBundle.
func (ca *CA) PEM() []byte { return ca.pem }

// Issue returns a serving certificate, good for clients too, and its key for the given DNS names
// and IP addresses. The first is the common name.
func (ca *CA) Issue(hosts ...string) (certPEM, keyPEM []byte, err error) {
	name := ""
	if len(hosts) > 0 {
		name = hosts[0]
	}
	template, err := certificate(name)
	if err != nil {
		return nil, nil, err
	}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	for _, host := range hosts {
		if address, err := netip.ParseAddr(host); err == nil {
			template.IPAddresses = append(template.IPAddresses, net.IP(address.AsSlice()))
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return ca.sign(template)
}

// IssueClient returns a certificate by which the API server knows its bearer as user, a member of
// groups, and its key.
func (ca *CA) IssueClient(user string, groups ...string) (certPEM, keyPEM []byte, err error) {
	template, err := certificate(user)
	if err != nil {
		return nil, nil, err
	}
	template.Subject.Organization = groups
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return ca.sign(template)
}

func (ca *CA) sign(template *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	name := template.Subject.CommonName
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("generate a key for %q: %w", name, err)
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, ca.certificate, key.Public(), ca.key)
	if err != nil {
		return nil, nil, fmt.Errorf("sign a certificate for %q: %w", name, err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encode the key for %q: %w", name, err)
	}
	return encode("CERTIFICATE", der), encode("PRIVATE KEY", keyDER), nil
}

// IssueFiles is Issue into tls.crt, tls.key and ca.crt in dir, which is created: the files of a TLS
// secret.
func (ca *CA) IssueFiles(dir string, hosts ...string) error {
	cert, key, err := ca.Issue(hosts...)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write a certificate for %q: %w", hosts, err)
	}
	for name, content := range map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": ca.pem} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return fmt.Errorf("write a certificate for %q: %w", hosts, err)
		}
	}
	return nil
}

// certificate is what all certificates here have in common.
func certificate(name string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("choose a serial number: %w", err)
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(7 * 24 * time.Hour),
	}, nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
