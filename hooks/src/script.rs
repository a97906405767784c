//! firn-hook as a script that CRIU runs at a restore. CRIU gives it no argument: the link by which it is called lies in the
//! bundle.

use std::path::Path;
use std::process::ExitCode;

use firn_config::names;
use firn_oci::script;

/// Does what there is to do at this moment, if anything.
pub fn run(action: &str) -> ExitCode {
    if action != script::MOMENT {
        return ExitCode::SUCCESS;
    }
    let called = std::env::args_os().next().unwrap_or_default();
    let bundle = Path::new(&called).parent().filter(|dir| dir.is_absolute());
    let init = std::env::var(names::ENV_CRIU_INIT).ok();
    let (Some(bundle), Some(init)) = (bundle, init.and_then(|pid| pid.parse().ok())) else {
        tell!("firn-hook: CRIU does not call its script as it should");
        return ExitCode::FAILURE;
    };
    match script::run(bundle, init) {
        Ok(repaired) => {
            tell!("firn-hook: device nodes: {repaired:?}");
            ExitCode::SUCCESS
        }
        Err(refusal) => {
            tell!("firn-hook: {}: {refusal}. hint: {}", refusal.code, refusal.hint);
            ExitCode::FAILURE
        }
    }
}
