// Package e2e runs both binaries against each other: the host's in the
// namespace that plays the Mac, the agent beside a real Docker engine.
package e2e
