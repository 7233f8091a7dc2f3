export default {
  extends: ['stylelint-config-standard'],
  plugins: ['stylelint-csstree-validator'],
  rules: {
    'csstree/validator': true,
    'custom-property-pattern': '^(accel-nb|jp|vscode)-[a-z0-9-]+$',
    // Classes of our own are accel-nb-*; jp-* and u-* belong to JupyterLab and uPlot.
    'selector-class-pattern': '^(accel-nb|jp|u)-[A-Za-z0-9-]+$|^uplot$',
    'no-descending-specificity': null
  }
};
