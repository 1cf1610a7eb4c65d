//! Prints the CustomResourceDefinition as YAML; `make generate` writes it into the chart.

fn main() {
    print!("{}", stoker_crds::crd::yaml());
}
