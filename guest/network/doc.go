// Package network owns the packet rules that route the host to containers: it
// computes them (Desired), reads what is there (Current), compares (Diff) and
// applies the difference in one nftables transaction (Apply).
//
// Everything that klimax decides by itself lives in the own table "ip klimax".
// Where only a chain of iptables or Docker can accept a packet, commented rules
// are kept there, in a form that iptables can print and restore.
package network
