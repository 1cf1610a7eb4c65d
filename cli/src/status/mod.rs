//! `kubectl stoker status`: one deployment on one screen, from the API server alone.

mod screen;

use anyhow::Result;
use clap::Args;
use jiff::Timestamp;

use self::screen::Facts;
use crate::{
    cluster::{Cluster, ClusterArgs},
    output::Output,
};

/// Whose status.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The InferenceDeployment.
    name: String,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Prints the screen.
pub(crate) async fn status(args: &Status) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let deployment = cluster.deployment(&args.name).await?;
    let pods = cluster.pods_of(&deployment).await?;
    let facts = Facts { deployment, pods, now: Timestamp::now() };
    args.output.print(&screen::screen(&facts), || screen::json(&facts));
    Ok(())
}
