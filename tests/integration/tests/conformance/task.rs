//! 1.4: the task service.

use anyhow::Result;
use firn_lab::{Task, told};

use crate::{Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.4 kill: a signal goes by its number",
        "exit code 74",
        kill_by_number,
    ),
    Point::same(
        "1.4 kill: what does not run is not found",
        "process already finished",
        kill_of_the_dead,
    ),
];

const SLEEP: &str = "trap 'exit 74' USR1; while :; do sleep 0.05; done";

fn kill_by_number(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], SLEEP)?;
    let task = Task::of(place.host, "c")?;
    let killed = task.kill("", 10, false);
    container.becomes("STOPPED")?;
    let seen = format!(
        "{}\nexit code {}",
        told(&killed, |()| "ok".into()),
        container.exit_code()?
    );
    container.forget()?;
    Ok(seen)
}

fn kill_of_the_dead(place: &Place<'_>) -> Result<String> {
    let container = place.start("c", &[], "exit 0")?;
    container.becomes("STOPPED")?;
    let task = Task::of(place.host, "c")?;
    let init = told(&task.kill("", 9, false), |()| "ok".into());
    let exec = told(&task.kill("nosuch", 9, false), |()| "ok".into());
    drop(task);
    container.remove()?;
    Ok(format!("init {init}\nexec {exec}"))
}
