// Package machine boots throw-away Debian machines for tests: a root file
// system of the running distribution under systemd-nspawn, with systemd as
// PID 1 or without any init, in a network namespace of its own whose
// interface lima0 leads to a second namespace that plays the Mac.
//
// A machine takes about four seconds to boot because all of them are overlays
// over one pristine root, which debootstrap makes once from the package
// sources that this computer itself uses. That root holds Docker's packages
// as files, so that they can be installed inside without a network.
//
// Everything a machine consists of is removed when its test ends, also when
// the test process dies: a child process waits for the end of a pipe that
// only the test process holds.
package machine
