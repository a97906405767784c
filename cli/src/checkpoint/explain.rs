//! The commands of ctr that do the same.

use crate::args::checkpoint::CheckpointArgs;
use crate::output::verbatim;
use crate::place::Place;

/// Prints them.
pub fn print(args: &CheckpointArgs, place: &Place) {
    let ctr = ctr(args);
    let id = &args.container;
    let image = match place {
        Place::Ref(name) => name.clone(),
        _ => format!("checkpoint/{id}"),
    };
    let take = format!("{ctr} containers checkpoint --rw --task {id} {image}");
    match place {
        Place::Ref(_) => verbatim!("{take}"),
        Place::File(path) => {
            verbatim!("{take}");
            let path = path.display();
            verbatim!("{ctr} images export --local --skip-manifest-json {path} {image}");
            verbatim!("{ctr} images rm --sync {image}");
        }
        Place::Dir(path) => {
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
