//! The commands of ctr that do the same.

use crate::args::checkpoint::CheckpointArgs;
use crate::output::verbatim;
use crate::place::Location;

/// Prints them.
pub fn print(args: &CheckpointArgs, place: &Location) {
    let ctr = ctr(args);
    let id = &args.container;
    let image = match place {
        Location::Ref(name) => name.clone(),
        _ => format!("checkpoint/{id}"),
    };
    let take = format!("{ctr} containers checkpoint --rw --task {id} {image}");
    match place {
        Location::Ref(_) => verbatim!("{take}"),
        Location::File(path) => {
            verbatim!("{take}");
            let path = path.display();
            verbatim!("{ctr} images export --local --skip-manifest-json {path} {image}");
            verbatim!("{ctr} images rm --sync {image}");
        }
        Location::Dir(path) => {
            let path = path.display();
            verbatim!("{ctr} tasks checkpoint --image-path {path}/checkpoint {id}");
        }
    }
    if args.exit {
        verbatim!("{ctr} tasks kill --signal SIGKILL --all {id}");
        verbatim!("{ctr} tasks delete {id}");
    }
}

fn ctr(args: &CheckpointArgs) -> String {
    crate::text::ctr(&args.containerd.address, args.namespace())
}
