//! Signals for CRIU at the end of a dump, when it has dumped everything and ended nothing yet.

use anyhow::{Result, ensure};

use crate::GpuHost;

/// Where the script finds what to do, once, and where it leaves that it has done it.
const ORDER: &str = "/run/blow";
const STRUCK: &str = "/run/struck";

/// CRIU runs this script. The order has a signal, and the name of the program that gets it: CRIU, or one that
/// waits for it.
const SCRIPT: &str = "#!/bin/sh
    [ \"$CRTOOLS_SCRIPT_ACTION\" = post-dump ] && mv /run/blow /run/struck || exit 0
    read signal victim </run/struck
    pid=$PPID
    while [ \"$(cat /proc/$pid/comm)\" != $victim ]; do
        pid=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$pid/status)
    done
    kill -$signal $pid
    sleep 1";

impl GpuHost {
    /// Lets CRIU run the script in every dump.
    pub fn install_blow(&self) -> Result<()> {
        let node = self.node();
        node.write("/run/action", SCRIPT)?;
        node.run(&["chmod", "755", "/run/action"])?;
        node.run(&["mkdir", "-p", "/etc/criu"])?;
        node.write("/etc/criu/runc.conf", "action-script /run/action\n")
    }

    /// Sends a signal in the next dump: `KILL criu`.
    pub fn blow(&self, order: &str) -> Result<()> {
        self.node().run(&["rm", "-f", STRUCK])?;
        self.node().write(ORDER, order)
    }

    /// The signal of the last order was sent.
    pub fn was_struck(&self) -> Result<()> {
        ensure!(self.node().path(STRUCK).exists(), "nothing was sent a signal");
        Ok(())
    }
}
